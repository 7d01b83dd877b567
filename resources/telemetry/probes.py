"""How long the calls of a grader took, and which of them were slow."""

from collections.abc import Sequence
from typing import Any

from resources.telemetry.rollout_gauge import quantile

SLOW_CALL_RATIO = 5.0
"""A grader call longer than this many medians is a slow one."""
SLOW_CALL_FLOOR_SECONDS = 0.1
"""Below this nothing counts as slow: it is jitter of a busy machine."""
SLOW_CALL_SHARE = 0.1
"""Nor does a call that took less than this share of the longest one: beside that it does not matter."""


class GraderLatency:
    """Latencies of one grader in one iteration."""

    def __init__(self, name: str, kind: str, workers: int = 1) -> None:
        self.name = name
        self.kind = kind
        """rule, python, model, judge, http or sandbox, as in the config."""
        self.workers = workers
        """Calls that can be under way at once."""
        self._seconds: list[float] = []
        self._timeouts = 0

    def add(self, seconds: float, *, timed_out: bool = False) -> None:
        self._seconds.append(seconds)
        self._timeouts += timed_out

    def facts(self) -> dict[str, Any]:
        """One entry of the `graders` fact.

        >>> latency = GraderLatency("math", "rule")
        >>> for seconds in (0.01, 0.01, 0.01, 4.0):
        ...     latency.add(seconds)
        >>> latency.facts()["slow_calls"], latency.facts()["p50_seconds"]
        (1, 0.01)
        """
        return {
            "name": self.name,
            "kind": self.kind,
            "workers": self.workers,
            "timeouts": self._timeouts,
            **_latencies(self._seconds),
        }


def _latencies(seconds: Sequence[float]) -> dict[str, Any]:
    if not seconds:
        return {"calls": 0}
    ordered = sorted(seconds)
    median = quantile(ordered, 0.5)
    slow = max(SLOW_CALL_RATIO * median, SLOW_CALL_FLOOR_SECONDS, SLOW_CALL_SHARE * ordered[-1])
    return {
        "calls": len(ordered),
        "p50_seconds": median,
        "p95_seconds": quantile(ordered, 0.95),
        "max_seconds": ordered[-1],
        "total_seconds": sum(ordered),
        "slow_calls": sum(value > slow for value in ordered),
    }
