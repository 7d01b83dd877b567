"""Timers that nest: total, self time and count of each name, and the CPU time the timers themselves cost.

One `Timers` belongs to one call in one thread. A child's time is inside its parent's; sums use self times, which count
each moment once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What one name took: `self_seconds` is total less the timers inside it."""

    total_seconds: float
    self_seconds: float
    count: int


class Timers:
    """Nested context-manager timers.

    >>> ticks = iter([0.0, 1.0, 2.0, 6.0])
    >>> timers = Timers(clock=lambda: next(ticks))
    >>> with timers.time("generate"):
    ...     with timers.time("sync"):
    ...         pass
    >>> timers["generate"].self_seconds
    5.0
    """

    def __init__(self, clock: Clock = time.monotonic, cpu_clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._stack: list[_Running] = []
        self._totals: dict[str, list[float]] = {}
        self.own_cpu_seconds = 0.0

    def time(self, name: str) -> "_Running":
        """Times the `with` block; entering a name again adds to it."""
        return _Running(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Adds a duration measured elsewhere, inside whatever timer runs now."""
        self._record(name, seconds, 0.0)

    def __getitem__(self, name: str) -> Timing:
        total, inner, count = self._totals[name]
        return Timing(total_seconds=total, self_seconds=total - inner, count=int(count))

    def __contains__(self, name: str) -> bool:
        return name in self._totals

    def seconds(self, name: str) -> float:
        """Self seconds of a name; 0 if it was never entered."""
        return self[name].self_seconds if name in self._totals else 0.0

    def _record(self, name: str, seconds: float, inner: float) -> None:
        entry = self._totals.setdefault(name, [0.0, 0.0, 0.0])
        if all(running.name != name for running in self._stack):  # a recursive timer is already inside its own total
            entry[0] += seconds
            entry[1] += inner
        else:
            entry[1] -= seconds - inner
        entry[2] += 1
        if self._stack:
            self._stack[-1].inner += seconds


class _Running:
    """One entered timer."""

    __slots__ = ("_start", "_timers", "inner", "name")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self.name = name
        self.inner = 0.0
        self._start = 0.0

    def __enter__(self) -> "_Running":
        timers = self._timers
        cpu = timers._cpu_clock()
        timers._stack.append(self)
        self._start = timers._clock()
        timers.own_cpu_seconds += timers._cpu_clock() - cpu
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timers = self._timers
        seconds = timers._clock() - self._start
        cpu = timers._cpu_clock()
        if timers._stack.pop() is not self:
            raise RuntimeError(
                f"timer {self.name!r} ended while a timer inside it still ran; timers belong to one thread"
            )
        timers._record(self.name, seconds, self.inner)
        timers.own_cpu_seconds += timers._cpu_clock() - cpu
