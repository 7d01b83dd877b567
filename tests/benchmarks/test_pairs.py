"""Two sides timed in turn: neither finds what the other has left."""

from typing import Any

from benchmarks.pairs import time_sides


class Loop:
    """A side that notes what is asked of it; its engine keeps prompts until it is told to forget them."""

    def __init__(self, name: str, cached: set[int], seen: list[tuple[str, str, Any]]) -> None:
        self.name, self.cached, self.seen = name, cached, seen

    def sample(self, iteration: int) -> list[str] | None:
        self.seen.append((self.name, "warm" if iteration in self.cached else "cold", iteration))
        self.cached.add(iteration)
        return [f"rows of {self.name}, {iteration}"] if self.name == "ours" else None

    def train(self, rows: Any) -> None:
        self.seen.append((self.name, "trains", rows))


def test_no_side_samples_prompts_that_are_in_the_cache_and_both_train_on_the_same_rows():
    cached: set[int] = set()
    seen: list[tuple[str, str, Any]] = []
    sides = {name: Loop(name, cached, seen) for name in ("ours", "bare")}
    times = time_sides(sides, cached.clear, rounds=2)
    assert [what for _, what, _ in seen] == ["cold", "trains"] * 6
    assert [rows for _, what, rows in seen if what == "trains"] == [
        [f"rows of ours, {iteration}"] for iteration in (0, 0, 1, 1, 2, 2)
    ]
    assert {name: len(values) for name, values in times.items()} == {
        "ours samples": 2, "ours trains": 2, "bare samples": 2, "bare trains": 2
    }  # fmt: skip
