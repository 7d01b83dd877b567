"""Stretches of time as (start, end): joined, cut out of one another, measured. Empty ones are dropped."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending and disjoint.

    >>> union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (5.0, 5.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of `intervals`; both ascending and disjoint.

    >>> subtract([(0.0, 4.0)], [(1.0, 2.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    left: list[Interval] = []
    for begin, end in intervals:
        cursor = begin
        for hole_begin, hole_end in holes:
            if hole_end <= cursor or hole_begin >= end:
                continue
            if hole_begin > cursor:
                left.append((cursor, hole_begin))
            cursor = max(cursor, hole_end)
        if cursor < end:
            left.append((cursor, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap(one: Interval, other: Interval) -> float:
    """Seconds that two have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
