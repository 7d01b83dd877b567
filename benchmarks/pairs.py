"""Two sides of a comparison, timed in turn on the same rows, each from the same state of what they share."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Side(Protocol):
    """One side of an iteration."""

    def sample(self, iteration: int) -> Any:
        """Sample; the side that is asked first gives the rows that all of them train on."""
        ...

    def train(self, rows: Any) -> None:
        """Everything behind sampling."""
        ...


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of a call, and what it gave."""
    begun = time.perf_counter()
    given = call()
    return time.perf_counter() - begun, given


def time_sides(sides: Mapping[str, Side], forget: Callable[[], None], rounds: int) -> dict[str, list[float]]:
    """`SIDE samples` and `SIDE trains` -> seconds of each round, after one that warms up.

    forget: drops what one side's sampling would leave to the next one's. Called before each, so that none is timed with
        prompts that are in a cache.
    """
    times: dict[str, list[float]] = {f"{side} {part}": [] for side in sides for part in ("samples", "trains")}
    for iteration in range(rounds + 1):
        rows: Any = None
        for side, loop in sides.items():
            forget()
            sampled, own = seconds(lambda loop=loop, number=iteration: loop.sample(number))
            rows = own if rows is None else rows
            trained, _ = seconds(lambda loop=loop, rows=rows: loop.train(rows))
            if iteration:
                times[f"{side} samples"].append(sampled)
                times[f"{side} trains"].append(trained)
    return times
