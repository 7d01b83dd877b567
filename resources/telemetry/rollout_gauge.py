"""What happens inside an engine while it samples: slots over time, long tail, starvation, KV cache, lengths."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

TAIL_FRACTION = 0.25
"""Fewer busy slots than this fraction, and nobody waiting, is the long tail."""
_SERIES_POINTS = 64
_QUANTILES = 17


class RolloutGauge:
    """Observes one engine during one rollout; `facts()` are ready for a rank span.

    The caller says after each engine step (or every few) how many sequences run and wait; a state holds until the next
    observation. `tokens` is the count sampled so far; with it the cost of a decode step is fitted. `steps` are the
    decode steps since the last observation: slots may be filled again within one, so tokens over running are too many.

    >>> clock = iter([0.0, 0.0, 2.0, 6.0])
    >>> gauge = RolloutGauge(slots=8, clock=lambda: next(clock))
    >>> gauge.observe(running=8); gauge.observe(running=1)
    >>> gauge.facts()["long_tail_seconds"]
    4.0
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; an engine runs at least one sequence")
        self.slots = slots
        self._clock = clock
        self._start = clock()
        self._last: tuple[float, int, int, float, int | None] | None = None
        self._series: list[tuple[float, int, int]] = []
        self._tail_seconds = 0.0
        self._starved_seconds = 0.0
        self._kv_seconds = 0.0
        self._kv_max = 0.0
        self._observed_seconds = 0.0
        self._sums = [0.0] * 5  # steps^2, steps*tokens, tokens^2, steps*dt, tokens*dt
        self._steps = 0.0
        self.preemptions = 0

    def observe(
        self,
        *,
        running: int,
        waiting: int = 0,
        kv_cache_use: float = 0.0,
        tokens: int | None = None,
        steps: float | None = None,
        preemptions: int = 0,
    ) -> None:
        """The engine's state now; `preemptions` are those since the last observation."""
        now = self._clock()
        self._account(now, tokens, steps)
        self._steps += steps or 0.0
        self.preemptions += preemptions
        self._kv_max = max(self._kv_max, kv_cache_use)
        if self._last is None or self._last[1:3] != (running, waiting):
            self._series.append((now - self._start, running, waiting))
        self._last = (now, running, waiting, kv_cache_use, tokens)

    def _account(self, now: float, tokens: int | None, steps: float | None = None) -> None:
        if self._last is None:
            return
        then, running, waiting, kv_use, tokens_before = self._last
        seconds = now - then
        self._observed_seconds += seconds
        self._kv_seconds += kv_use * seconds
        if waiting:
            self._starved_seconds += seconds * max(0, min(self.slots, running + waiting) - running) / self.slots
        elif 0 < running < TAIL_FRACTION * self.slots:
            self._tail_seconds += seconds
        if tokens is not None and tokens_before is not None and running and tokens > tokens_before:
            sampled = tokens - tokens_before
            steps = sampled / running if steps is None else steps
            for index, product in enumerate(
                (steps * steps, steps * sampled, sampled * sampled, steps * seconds, sampled * seconds)
            ):
                self._sums[index] += product

    def facts(self) -> dict[str, Any]:
        """Closes the last state and returns the facts of `facts.py`, rollout section."""
        now = self._clock()
        self._account(now, None)
        if self._last is not None:
            self._last = (now, *self._last[1:])
        series = _thinned([*self._series, (now - self._start, 0, 0)])
        facts: dict[str, Any] = {
            "slots": self.slots,
            "running": [[round(t, 4), running] for t, running, _ in series],
            "long_tail_seconds": self._tail_seconds,
            "preemptions": self.preemptions,
        }
        if any(waiting for _, _, waiting in series):
            facts["waiting"] = [[round(t, 4), waiting] for t, _, waiting in series]
            facts["starved_seconds"] = self._starved_seconds
        if self._kv_max:
            facts["kv_cache_use_mean"] = self._kv_seconds / max(self._observed_seconds, 1e-9)
            facts["kv_cache_use_max"] = self._kv_max
        if self._steps:
            facts["decode_steps"] = self._steps
        fit = fit_decode_cost(self._sums)
        if fit is not None:
            facts["decode_step_seconds"], facts["decode_token_seconds"] = fit
        return facts


def expected_decode_steps(tokens: float, longest: float, slots: float) -> float:
    """Decode steps until `tokens` are sampled in `slots`, each of which takes the next response as it gets free.

    List scheduling lies between tokens / slots and that plus the longest response; the middle is close for many rows.
    """
    return max(longest, tokens / slots + longest * (1 - 1 / slots) / 2)


def fit_decode_cost(sums: Sequence[float]) -> tuple[float, float] | None:
    """Least squares of `seconds = step_cost * steps + token_cost * tokens`, both >= 0, from its five sums."""
    ss, st, tt, sd, td = sums
    if ss <= 0 or tt <= 0:
        return None
    determinant = ss * tt - st * st
    if determinant > 1e-6 * ss * tt:
        step, token = (sd * tt - td * st) / determinant, (td * ss - sd * st) / determinant
        if step >= 0 and token >= 0:
            return step, token
    # One of them explains nothing (or the batch never changed size): keep the one that fits better.
    return (sd / ss, 0.0) if sd * sd / ss >= td * td / tt else (0.0, td / tt)


def _thinned(series: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """At most 64 points, first and last kept, evenly over time."""
    if len(series) <= _SERIES_POINTS:
        return series
    times = [t for t, _, _ in series]
    begin, end = times[0], times[-1]
    picked = {
        min(len(series) - 1, bisect_left(times, begin + (end - begin) * k / (_SERIES_POINTS - 1)))
        for k in range(_SERIES_POINTS)
    }
    return [series[index] for index in sorted(picked | {0, len(series) - 1})]


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear quantile of an ascending, non-empty sequence.

    >>> quantile([1.0, 2.0, 3.0], 0.75)
    2.5
    """
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def histogram_edge(length: int) -> int:
    """Lower edge, in steps of a quarter octave, of the bucket a length falls in; short lengths have their own.

    >>> [histogram_edge(n) for n in (0, 3, 16, 17, 1000)]
    [0, 3, 16, 16, 861]
    """
    if length < 8:
        return length
    edge = round(2 ** (math.floor(4 * math.log2(length)) / 4))
    return edge if edge <= length else round(2 ** ((math.floor(4 * math.log2(length)) - 1) / 4))


def next_edge(edge: int) -> int:
    """Lower edge of the bucket after the one that begins at `edge`.

    >>> [next_edge(edge) for edge in (3, 16, 861)]
    [4, 19, 1024]
    """
    length = edge + 1
    while histogram_edge(length) <= edge:
        length += 1
    return histogram_edge(length)


def response_length_facts(lengths: Sequence[int]) -> dict[str, Any]:
    """Facts of the lengths as trained on (after truncation), empty for no response."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    histogram: dict[str, int] = {}
    for length in ordered:
        key = str(histogram_edge(length))
        histogram[key] = histogram.get(key, 0) + 1
    return {
        "rows": len(ordered),
        "response_length_p50": quantile(ordered, 0.5),
        "response_length_p95": quantile(ordered, 0.95),
        "response_length_max": ordered[-1],
        "response_length_mean": sum(ordered) / len(ordered),
        "response_length_quantiles": [quantile(ordered, k / (_QUANTILES - 1)) for k in range(_QUANTILES)],
        "response_length_histogram": histogram,
    }


def group_long_tail_seconds(engines: Sequence[tuple[float, int, Sequence[Sequence[float]]]]) -> float:
    """Time during which all engines together had fewer than a quarter of their slots busy.

    `engines`: (start, slots, running series as in the facts) of each; times count from the earliest start. Waiting
    sequences are of no concern here: an engine that has some has slots busy, or starves.
    """
    slots = sum(engine_slots for _, engine_slots, _ in engines)
    changes = [
        (start + t, index, int(running)) for index, (start, _, series) in enumerate(engines) for t, running in series
    ]
    busy = [0] * len(engines)
    total, before = 0.0, 0.0
    started: set[int] = set()
    for now, index, running in sorted(changes):
        if len(started) == len(engines) and 0 < sum(busy) < TAIL_FRACTION * slots:
            total += now - before
        busy[index] = running
        started.add(index)
        before = now
    return total
