"""The best layout for a number of accelerators, found by hill climbing over every way to share pools.

Pure. Every partition of the roles into pools is tried, with sizes first in proportion to their work, then improved by
moving ranks from pool to pool in ever smaller pieces.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.pools import MOST_BUNDLES
from resources.telemetry.profile import RunProfile
from resources.telemetry.topology import CPU_ROLES, Topology, measured_topology
from resources.telemetry.whatif import Prediction, predict

_SEARCH_DRAWS = 3
_SMALLEST_PIECE_FRACTION = 1 / 128
_CPU_POOL = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best layout, the best one of each partition (best first), and what it took."""

    best: Prediction
    alternatives: tuple[Prediction, ...]
    num_tried: int
    seconds: float
    is_complete: bool
    """False if the time limit ended the search early."""
    assumptions: tuple[str, ...] = ()
    """What was not measured, and how it was taken."""


def search_topology(
    profile: RunProfile,
    accelerators: int,
    *,
    max_async_depth: int = 0,
    base: Topology | None = None,
    allowed: Callable[[Sequence[Sequence[str]]], bool] = lambda parts: True,
    limit_seconds: float = 8.0,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Best layout of the run's roles on `accelerators` ranks.

    Batch and group size are those of `base` (the measured layout when None); roles that need no accelerator keep their
    workers, on a pool of CPUs. `allowed` may refuse a partition (lists of roles that share a pool). Raises ValueError
    if no layout fits: too few accelerators for the engine, or too little memory.
    """
    if not 1 <= accelerators <= MOST_BUNDLES:
        raise ValueError(f"accelerators is {accelerators}; a layout has 1 to {MOST_BUNDLES}; give as many as you have")
    start = base or measured_topology(profile)
    begin = clock()
    climber = _Climber(profile, start, accelerators, lambda: clock() - begin > limit_seconds)
    best_of: list[Prediction] = []
    is_complete = True
    roles = sorted({task.role for task in profile.tasks.values()} - CPU_ROLES)
    if profile.grader is None and "reward" in profile.roles and profile.roles["reward"] in profile.accelerator_pools:
        roles.append("reward")
    # Fewer pools first: they are cheapest to search, and if time runs out the rest has been looked at.
    for parts in sorted(_partitions(roles), key=len):
        if len(parts) > accelerators or not allowed(parts):
            continue
        is_one_process = any({"actor", "rollout"} <= set(part) for part in parts)
        depths = range(start.async_depth, max(start.async_depth, max_async_depth) + 1)
        for depth in (0,) if is_one_process else depths:  # one process cannot sample while it updates
            if climber.is_late():
                is_complete = False
                break
            found = climber.climb(parts, depth)
            if found is not None:
                best_of.append(found)
    if not best_of:
        raise ValueError(
            f"no layout of {', '.join(roles)} fits on {accelerators} accelerators"
            f" (tensor_parallel {start.tensor_parallel}, {_memory_text(profile)})"
        )
    final = sorted((predict(profile, found.topology) for found in best_of), key=lambda found: found.step_seconds)
    return SearchResult(
        best=final[0],
        alternatives=tuple(final[:12]),
        num_tried=climber.num_tried,
        seconds=clock() - begin,
        is_complete=is_complete,
        assumptions=(*profile.assumptions, *_memory_assumptions(profile)),
    )


class _Climber:
    def __init__(self, profile: RunProfile, base: Topology, accelerators: int, is_late: Callable[[], bool]) -> None:
        self.profile = profile
        self.base = base
        self.accelerators = accelerators
        self.is_late = is_late
        self.num_tried = 0
        self._work = _work_of_roles(profile)
        per_rank = profile.cores / max(1, sum(profile.pools.values()))
        # Added accelerators bring their host's cores; the measured cores are never taken away.
        self._cores = max(profile.cores, per_rank * accelerators) if profile.cores else 0.0

    def climb(self, parts: Sequence[Sequence[str]], depth: int) -> Prediction | None:
        """The best sizes for one partition, or None if none fits."""
        sizes = self._proportional(parts)
        best = self._try(parts, sizes, depth)
        piece = max(1, self.accelerators // 4)
        smallest = max(1, int(self.accelerators * _SMALLEST_PIECE_FRACTION))
        while len(parts) > 1 and piece >= smallest and not self.is_late():
            better, better_sizes = best, sizes
            for giver in range(len(parts)):
                for taker in range(len(parts)):
                    if giver == taker or sizes[giver] <= piece:
                        continue
                    moved = list(sizes)
                    moved[giver] -= piece
                    moved[taker] += piece
                    found = self._try(parts, moved, depth)
                    if found is not None and (better is None or found.step_seconds < better.step_seconds * (1 - 1e-6)):
                        better, better_sizes = found, moved
            if better is best:
                piece //= 2
            best, sizes = better, better_sizes
        return best

    def _proportional(self, parts: Sequence[Sequence[str]]) -> list[int]:
        work = [max(1e-9, sum(self._work.get(role, 0.0) for role in part)) for part in parts]
        sizes = [max(1, int(self.accelerators * share / sum(work))) for share in work]
        for index, part in enumerate(parts):
            if "rollout" in part:
                sizes[index] = max(sizes[index], self.base.tensor_parallel)
        while sum(sizes) > self.accelerators and max(sizes) > 1:
            sizes[sizes.index(max(sizes))] -= 1
        sizes[work.index(max(work))] += max(0, self.accelerators - sum(sizes))
        return sizes

    def _try(self, parts: Sequence[Sequence[str]], sizes: Sequence[int], depth: int) -> Prediction | None:
        topology = self._topology(parts, sizes, depth)
        if topology is None or not fits_memory(self.profile, topology):
            return None
        self.num_tried += 1
        return predict(self.profile, topology, num_draws=_SEARCH_DRAWS)

    def _topology(self, parts: Sequence[Sequence[str]], sizes: Sequence[int], depth: int) -> Topology | None:
        pools: dict[str, int] = {}
        roles: dict[str, str] = {}
        colocate: dict[str, str] = {}
        for part, size in zip(parts, sizes, strict=True):
            name = "-".join(part)
            pools[name] = size
            for role in part:
                roles[role] = name
                colocate[role] = "fused" if len(part) > 1 else "split"
        if pools[roles["rollout"]] < self.base.tensor_parallel if "rollout" in roles else False:
            return None
        for role, pool in self.profile.roles.items():
            if role not in roles:
                pools[_CPU_POOL] = max(pools.get(_CPU_POOL, 1), self.profile.pools[pool])
                roles[role] = _CPU_POOL
        accelerated = frozenset(name for name in pools if name != _CPU_POOL)
        return replace(
            self.base,
            pools=pools,
            roles=roles,
            colocate=colocate,
            accelerator_pools=accelerated,
            async_depth=depth,
            cores=self._cores,
            workers={role: limit for role, limit in self.base.workers.items() if roles[role] == _CPU_POOL},
        )


def fits_memory(profile: RunProfile, topology: Topology) -> bool:
    """Whether the measured peaks fit: training states shrink with ranks, an engine's do not. True if unmeasured.

    A peak is that of the whole process: roles that were fused have one, which each of them may need alone.
    """
    if not profile.accelerator_bytes:
        return True
    peaks: dict[str, dict[str, float]] = {}
    for task in profile.tasks.values():
        pool = topology.roles[task.role]
        if pool not in topology.accelerator_pools:
            continue
        shrink = 1.0 if task.role == "rollout" else task.num_ranks / topology.ranks_of(task.role)
        of_pool, process = peaks.setdefault(pool, {}), _measured_process(profile, task.role)
        of_pool[process] = max(of_pool.get(process, 0.0), task.memory_bytes * shrink)
    return all(sum(needed.values()) <= profile.accelerator_bytes for needed in peaks.values())


def _measured_process(profile: RunProfile, role: str) -> str:
    return f"fused on {profile.roles[role]}" if profile.colocate.get(role) == "fused" else role


def _memory_text(profile: RunProfile) -> str:
    known = profile.accelerator_bytes
    return f"{known:.0f} bytes of memory each" if known else "their memory is unknown and was not looked at"


def _memory_assumptions(profile: RunProfile) -> Iterator[str]:
    """What `fits_memory` could not look at."""
    if not profile.accelerator_bytes:
        yield "the memory of an accelerator is unknown: no layout was left out for want of it"
        return
    known = {task.role for task in profile.tasks.values() if task.memory_bytes}
    unknown = sorted({task.role for task in profile.tasks.values()} - known - CPU_ROLES)
    if unknown:
        yield f"the memory that {', '.join(unknown)} took was not measured: taken as none"


def _work_of_roles(profile: RunProfile) -> Mapping[str, float]:
    work: dict[str, float] = {}
    for task in profile.tasks.values():
        work[task.role] = work.get(task.role, 0.0) + task.mean_seconds * task.num_ranks
    return work


def _partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to put the roles into pools: 52 for five roles.

    >>> sum(1 for _ in _partitions(["a", "b", "c"]))
    5
    """
    if not roles:
        yield []
        return
    first, rest = roles[0], roles[1:]
    for parts in _partitions(rest):
        yield [[first], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]
