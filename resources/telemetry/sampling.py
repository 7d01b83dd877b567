"""What a rollout would take in another layout: response lengths drawn as they were measured, decoded in slots.

Pure. The same draw gives the same responses to every layout.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from resources.telemetry.profile import RolloutProfile
from resources.telemetry.rollout_gauge import expected_decode_steps
from resources.telemetry.topology import Topology

_MAX_EXACT_ROWS = 4096
_MOMENTS = 32
"""Of a rollout, at which grading is asked how much it has still to do."""


def rollout_seconds_of(rollout: RolloutProfile, topology: Topology, draw: int) -> float:
    """The slowest engine, for one draw of response lengths; groups go to engines by number."""
    engines = max(1, topology.ranks_of("rollout") // topology.tensor_parallel)
    slots = topology.max_running_sequences or rollout.slots
    steps_and_tokens = _decode_work(
        rollout.length_edges,
        rollout.length_weights,
        topology.prompts_per_iteration,
        topology.group_size,
        engines,
        slots,
        draw,
    )
    return rollout.overhead_seconds + max(
        rollout.step_seconds * steps + rollout.token_seconds * tokens for steps, tokens in steps_and_tokens
    )


@lru_cache(maxsize=4096)
def _decode_work(
    edges: tuple[int, ...],
    weights: tuple[float, ...],
    prompts: int,
    group_size: int,
    engines: int,
    slots: int,
    draw: int,
) -> tuple[tuple[float, float], ...]:
    """(decode steps, tokens) of each engine. The same draw gives the same responses to every layout."""
    shares = _shares(_drawn_lengths(edges, weights, prompts * group_size, draw), group_size, engines)
    return tuple((_decode_steps(share, slots), float(sum(share))) for share in shares)


def _shares(lengths: Sequence[int], group_size: int, engines: int) -> list[list[int]]:
    """Response lengths of each engine that has any."""
    shares: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        shares.setdefault((row // group_size) % engines, []).append(length)
    return list(shares.values())


def finished_shares(rollout: RolloutProfile, topology: Topology) -> tuple[tuple[float, float], ...]:
    """(moment as a share of the rollout, share of the responses that end then or later), for one draw of lengths."""
    engines = max(1, topology.ranks_of("rollout") // topology.tensor_parallel)
    slots = topology.max_running_sequences or rollout.slots
    rows = (topology.prompts_per_iteration, topology.group_size)
    return _finished_shares(rollout.length_edges, rollout.length_weights, *rows, engines, slots)


@lru_cache(maxsize=4096)
def _finished_shares(
    edges: tuple[int, ...], weights: tuple[float, ...], prompts: int, group_size: int, engines: int, slots: int
) -> tuple[tuple[float, float], ...]:
    shares = _shares(_drawn_lengths(edges, weights, prompts * group_size, 0), group_size, engines)
    ends = sorted(end for share in shares for end in _finished_steps(share, slots))
    count = len(ends)
    first_of = sorted({index * count // _MOMENTS for index in range(_MOMENTS)})
    return (*((ends[index] / ends[-1], (count - index) / count) for index in first_of), (1.0, 1.0 / count))


def _finished_steps(lengths: Sequence[int], slots: int) -> list[float]:
    """The decode step in which each response ends; of very many, spread evenly over all steps."""
    if len(lengths) <= slots:
        return [float(length) for length in lengths]
    if len(lengths) > _MAX_EXACT_ROWS:
        steps = _decode_steps(lengths, slots)
        return [steps * (row + 1) / len(lengths) for row in range(len(lengths))]
    busy = [float(length) for length in lengths[:slots]]
    ends = list(busy)
    heapify(busy)
    for length in lengths[slots:]:
        ends.append(busy[0] + length)
        heapreplace(busy, ends[-1])
    return ends


@lru_cache(maxsize=64)
def _drawn_lengths(edges: tuple[int, ...], weights: tuple[float, ...], rows: int, draw: int) -> tuple[int, ...]:
    source = random.Random(f"{draw}")
    buckets = source.choices(range(len(weights)), weights, k=rows)
    lengths = []
    for bucket in buckets:
        low, high = edges[bucket], max(edges[bucket], edges[bucket + 1] - (bucket + 1 < len(weights)))
        lengths.append(low + int(source.random() * (high - low + 1)))
    return tuple(max(1, length) for length in lengths)


def _decode_steps(lengths: Sequence[int], slots: int) -> float:
    """Decode steps until all are done: each slot takes the next response as it gets free."""
    if len(lengths) <= slots:
        return float(max(lengths))
    if len(lengths) > _MAX_EXACT_ROWS:
        return expected_decode_steps(sum(lengths), max(lengths), slots)
    busy = [float(length) for length in lengths[:slots]]
    heapify(busy)
    for length in lengths[slots:]:
        heapreplace(busy, busy[0] + length)
    return max(busy)
