"""Clock offsets between nodes, estimated from round trips that the caller makes; and spans that await their correction.

Every machine's monotonic clock begins with its own boot, so two of them differ by hours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from resources.telemetry.spans import RankSpan, TaskSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """One question to a node: `sent` and `received` on the controller's clock, `remote` on the node's."""

    sent: float
    remote: float
    received: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockOffset:
    """`controller time = node time - seconds`, true within `error`."""

    seconds: float
    error: float


def estimate_offset(round_trips: Sequence[RoundTrip]) -> ClockOffset:
    """Offset of a node's clock from round trips (Cristian 1989; Marzullo and Owicki 1983).

    Each round trip confines the offset to [remote - received, remote - sent]; the answer is the middle of the
    intersection. If drift or a wrong reading leaves none, the shortest round trip alone decides.

    >>> estimate_offset([RoundTrip(sent=10.0, remote=110.5, received=11.0)])
    ClockOffset(seconds=100.0, error=0.5)
    """
    if not round_trips:
        raise ValueError("no round trip was measured; an offset needs at least one")
    backwards = [trip for trip in round_trips if trip.received < trip.sent]
    if backwards:
        raise ValueError(f"round trip {backwards[0]} was received before it was sent; both times are the asker's clock")
    low = max(trip.remote - trip.received for trip in round_trips)
    high = min(trip.remote - trip.sent for trip in round_trips)
    if low > high:
        best = min(round_trips, key=lambda trip: trip.received - trip.sent)
        low, high = best.remote - best.received, best.remote - best.sent
    return ClockOffset(seconds=(low + high) / 2, error=(high - low) / 2)


def correct_span(span: TaskSpan, offsets: Mapping[str, float]) -> TaskSpan:
    """A span of a run that wrote its clocks' offsets beside its spans (`ClockRecord`), on the controller's clock.

    The task's times are those of its node. Its ranks' are the controller's already, or (with rollout servers) its
    node's as well, which the file does not tell: whichever lies within the task.
    """
    shift = offsets.get(span.node, 0.0)
    if not shift:
        return span
    task = replace(span, started=span.started - shift, ended=span.ended - shift)
    return replace(task, ranks=tuple(_correct_rank(rank, task, shift) for rank in span.ranks))


def _correct_rank(rank: RankSpan, task: TaskSpan, shift: float) -> RankSpan:
    moved = replace(rank, start=rank.start - shift, end=rank.end - shift)
    return min(rank, moved, key=lambda one: max(0.0, task.started - one.start) + max(0.0, one.end - task.ended))
