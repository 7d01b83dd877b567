"""Two sides of a comparison that share an engine, timed in turn on the same rows; neither finds what the other left."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Side(Protocol):
    """One side of an iteration."""

    def sample(self, iteration: int) -> Any:
        """Sample with the weights that the engine has; the first side gives the rows that all of them train on."""
        ...

    def train(self, rows: Any) -> None:
        """Everything behind sampling, the new weights to the engine at the end."""
        ...


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of a call, and what it gave."""
    begun = time.perf_counter()
    given = call()
    return time.perf_counter() - begun, given


def time_sides(sides: Mapping[str, Side], forget: Callable[[], None], rounds: int) -> dict[str, list[float]]:
    """`SIDE samples` and `SIDE trains` -> seconds of each round, after one that warms up.

    A side trains before it samples, so that it samples with the weights that it has brought itself: what the first pass
    on new weights costs may depend on how they came.

    Args:
        sides: what is compared, by name.
        forget: empties the engine's cache of prompts; called before each sampling.
        rounds: how many are timed.
    """
    times: dict[str, list[float]] = {f"{side} {part}": [] for side in sides for part in ("samples", "trains")}
    rows = next(iter(sides.values())).sample(0)
    for number in range(rounds + 1):
        sampled: list[Any] = []
        for side, loop in sides.items():
            trains, _ = seconds(lambda loop=loop, rows=rows: loop.train(rows))
            forget()
            samples, given = seconds(lambda loop=loop, number=number: loop.sample(number + 1))
            sampled.append(given)
            if number:
                times[f"{side} samples"].append(samples)
                times[f"{side} trains"].append(trains)
        rows = sampled[0]
    return times
