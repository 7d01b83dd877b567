"""Two sides timed in turn: neither finds what the other has left."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.pairs import time_sides


@dataclass(kw_only=True)
class Engine:
    """Keeps prompts until it is told to forget them, and knows who brought its weights."""

    cached: set[int] = field(default_factory=set)
    weights_of: str = "nobody"


@dataclass(kw_only=True)
class Loop:
    """A side that notes what it finds."""

    name: str
    engine: Engine
    seen: list[tuple[Any, ...]]

    def sample(self, iteration: int) -> str:
        found = "warm" if iteration in self.engine.cached else "cold"
        self.seen.append((self.name, "samples", iteration, found, self.engine.weights_of))
        self.engine.cached.add(iteration)
        return f"rows {iteration} of {self.name}"

    def train(self, rows: str) -> None:
        self.seen.append((self.name, "trains", rows))
        self.engine.weights_of = self.name


def test_each_side_samples_cold_with_its_own_weights_and_all_train_on_the_first_ones_rows():
    engine, seen = Engine(), []
    sides = {name: Loop(name=name, engine=engine, seen=seen) for name in ("ours", "bare")}
    times = time_sides(sides, engine.cached.clear, rounds=1)
    assert seen == [
        ("ours", "samples", 0, "cold", "nobody"),
        ("ours", "trains", "rows 0 of ours"),
        ("ours", "samples", 1, "cold", "ours"),
        ("bare", "trains", "rows 0 of ours"),
        ("bare", "samples", 1, "cold", "bare"),
        ("ours", "trains", "rows 1 of ours"),
        ("ours", "samples", 2, "cold", "ours"),
        ("bare", "trains", "rows 1 of ours"),
        ("bare", "samples", 2, "cold", "bare"),
    ]
    assert {name: len(values) for name, values in times.items()} == {
        "ours samples": 1, "ours trains": 1, "bare samples": 1, "bare trains": 1
    }  # fmt: skip
