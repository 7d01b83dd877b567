"""What another layout would give: measured timings, rescaled, run through the event simulation.

Pure. Predicts the step time, each role's busy and idle share and the new bottleneck of any `Topology`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

from resources.telemetry.profile import RolloutProfile, RunProfile, TaskProfile
from resources.telemetry.rollout_gauge import expected_decode_steps
from resources.telemetry.simulation import Job, Outcome, busy_seconds, simulate
from resources.telemetry.spans import CONTROLLER
from resources.telemetry.topology import CPU_ROLES, Topology

_DRAWS = 6
"""Iterations of response lengths drawn for one prediction."""
_LATENCY_GROWTH = 0.25
"""Collectives slow by this fraction per doubling of ranks beyond the measured number: more hops, and node edges."""
_MAX_EXACT_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the simulator says of one layout, in seconds per iteration."""

    topology: Topology
    step_seconds: float
    busy_seconds: Mapping[str, float]
    """By role."""
    idle_seconds: Mapping[str, float]
    bottleneck: str
    """The role that works for most of the critical path, or the controller, whose gaps lie between."""
    bottleneck_share: float
    rows_per_second: float
    assumptions: tuple[str, ...] = ()


def predict(profile: RunProfile, topology: Topology, *, num_draws: int = _DRAWS) -> Prediction:
    """Predicts `topology` from a measured profile. Raises ValueError for a role the layout places nowhere."""
    missing = sorted({task.role for task in profile.tasks.values()} - set(topology.roles))
    if missing:
        raise ValueError(f"roles {missing} have no pool in this layout; name one for each role the run had")
    fill = 2 * topology.async_depth + 1  # iterations until the pipeline is full and steady
    rounds = fill + max(2, num_draws)
    rollout_seconds = (
        [rollout_seconds_of(profile.rollout, topology, draw) for draw in range(num_draws)] if profile.rollout else [0.0]
    )
    # Rounds after the last one measured keep the engines as busy as they are in the middle of a run.
    jobs, owner, ends = _jobs(profile, topology, rounds + topology.async_depth, rollout_seconds)
    ends = ends[:rounds]
    outcomes = simulate(jobs, topology.cores)
    begin, end = outcomes[ends[fill - 1]].end, outcomes[ends[-1]].end
    count = rounds - fill
    # Streamed grading also goes on under the rollout, outside the reward's job: the graders' capacity bounds the step.
    grading = _grading_capacity_seconds(profile, topology)
    step = max((end - begin) / count, grading)
    busy = {role: seconds / count for role, seconds in busy_seconds(jobs, outcomes, owner, begin, end).items() if role}
    on_path = _path_seconds(jobs, outcomes, owner, ends[-1], begin)
    bottleneck = max(on_path, key=lambda role: on_path[role], default="")
    if step == grading and grading > 0:
        bottleneck, on_path, busy = "reward", {"reward": step * count}, {**busy, "reward": step}
        end = begin + step * count
    return Prediction(
        topology=topology,
        step_seconds=step,
        busy_seconds=busy,
        idle_seconds={role: max(0.0, step - seconds) for role, seconds in busy.items()},
        bottleneck=bottleneck,
        bottleneck_share=on_path.get(bottleneck, 0.0) / max(1e-12, end - begin),
        rows_per_second=topology.prompts_per_iteration * topology.group_size / max(1e-12, step),
        assumptions=profile.assumptions,
    )


def _jobs(
    profile: RunProfile, topology: Topology, rounds: int, rollout_seconds: Sequence[float]
) -> tuple[list[Job], dict[str, str], list[int]]:
    """Jobs of all rounds; who owns each; and, for each round, the index of the job that ends it."""
    jobs: list[Job] = []
    owner: dict[str, str] = {}
    ends: list[int] = []
    order = _in_order(profile.tasks)
    # A subflow runs after the one before it. A rollout is submitted `async_depth` subflows ahead of its own, so it
    # waits for the end of round i - depth - 1, whose weights it samples with.
    for round_index in range(rounds):
        index_of: dict[str, int] = {}
        drawn = rollout_seconds[round_index % len(rollout_seconds)]
        for name in order:
            task = profile.tasks[name]
            needs = [index_of[upstream] for upstream in task.upstream if upstream in index_of]
            gate = round_index - 1 - (topology.async_depth if task.role == "rollout" and not needs else 0)
            if gate >= 0:
                needs.append(ends[gate])
            index_of[name] = len(jobs)
            job = _job(f"{round_index}/{name}", task, profile, topology, tuple(needs), drawn)
            jobs.append(job)
            owner[job.key] = task.role
        closing = Job(f"{round_index}/end", tuple(index_of.values()), profile.tail_seconds, 0.0)
        owner[closing.key] = ""
        ends.append(len(jobs))
        jobs.append(closing)
    return jobs, owner, ends


def _in_order(tasks: Mapping[str, TaskProfile]) -> list[str]:
    """Topological order of the tasks; an upstream that never ran in the profile is ignored."""
    order: list[str] = []
    left = dict(tasks)
    while left:
        free = [name for name, task in left.items() if not any(upstream in left for upstream in task.upstream)]
        if not free:
            raise ValueError(f"tasks {sorted(left)} wait for each other; a DAG has no ring")
        order += free
        for name in free:
            del left[name]
    return order


def _job(
    key: str, task: TaskProfile, profile: RunProfile, topology: Topology, needs: tuple[int, ...], rollout_seconds: float
) -> Job:
    pool = topology.roles[task.role]
    ranks = topology.ranks_of(task.role)
    rows_ratio = (
        topology.prompts_per_iteration
        * topology.group_size
        / max(1, profile.prompts_per_iteration * profile.group_size)
    )
    locks = [f"{pool}/fused" if topology.style_of(task.role) == "fused" else f"{pool}/{task.role}"]
    if task.role == "rollout":
        seconds = rollout_seconds * _speed_up_of_tensor_parallel(profile, topology)
    elif task.role == "reward" and profile.grader is not None:
        seconds = _grading_seconds(profile, rows_ratio, ranks / task.num_ranks, rollout_seconds)
    elif "weight" in task.task:
        seconds = _sync_seconds(task, profile, topology)
        locks = sorted({*locks, *_rollout_locks(topology)})
    else:
        seconds = training_seconds(task, ranks, topology.prompts_per_iteration * topology.group_size, rows_ratio)
    if (
        task.role in ("actor", "rollout")
        and profile.switch_seconds
        and topology.roles.get("actor") == topology.roles.get("rollout")
    ):
        seconds += profile.switch_seconds / sum(other.role in ("actor", "rollout") for other in profile.tasks.values())
    is_accelerated = pool in topology.accelerator_pools and task.role not in CPU_ROLES
    return Job(
        key=key,
        needs=needs,
        delay=task.overhead_seconds + task.transfer_seconds * rows_ratio,
        seconds=seconds * task.frequency,
        locks=tuple(locks),
        cores=task.cores_per_rank
        * (task.num_ranks if "weight" in task.task else ranks),  # a sync has the same work on any ranks
        accelerator=pool if is_accelerated else "",
    )


def _rollout_locks(topology: Topology) -> set[str]:
    """The engines take new weights between rollouts, not during one."""
    pool = topology.roles.get("rollout")
    return (
        set() if pool is None else {f"{pool}/fused" if topology.style_of("rollout") == "fused" else f"{pool}/rollout"}
    )


def training_seconds(task: TaskProfile, ranks: int, rows: int, rows_ratio: float) -> float:
    """Slowest rank of a training or scoring task on `ranks` ranks with `rows` rows, `rows_ratio` times the measured.

    (mean - fixed) * measured ranks / ranks * rows ratio, times what a remainder of rows adds to one rank, times the
    measured skew; plus the fixed part; plus collectives per micro-batch: a ring's (r - 1) / r, with _LATENCY_GROWTH.
    """
    useful = min(ranks, max(1, rows))
    scalable = (task.mean_seconds - task.fixed_seconds) * task.num_ranks / useful * rows_ratio
    remainder = math.ceil(rows / useful) * useful / max(1, rows)
    before = math.ceil(rows / rows_ratio / task.num_ranks) * task.num_ranks / max(1.0, rows / rows_ratio)
    skew = task.skew if useful > 1 else 1.0
    return (
        task.fixed_seconds
        + scalable * max(1.0, remainder / before) * skew
        + _collective_seconds(task, ranks, rows_ratio)
    )


def _collective_seconds(task: TaskProfile, ranks: int, rows_ratio: float) -> float:
    if task.num_ranks < 2 or ranks < 2:  # one rank has nobody to talk to
        return 0.0
    ring = ((ranks - 1) / ranks) / ((task.num_ranks - 1) / task.num_ranks)
    growth = 1 + _LATENCY_GROWTH * max(0.0, math.log2(ranks / task.num_ranks))
    batches = 1.0
    if task.micro_batches:
        batches = max(1.0, task.micro_batches * rows_ratio * task.num_ranks / ranks) / task.micro_batches
    return task.communication_seconds * ring * growth * batches


def _sync_seconds(task: TaskProfile, profile: RunProfile, topology: Topology) -> float:
    is_fused = topology.is_fused_with("actor", "rollout")
    known = profile.sync_seconds_fused if is_fused else profile.sync_seconds_split
    return task.mean_seconds if known is None else known


def _grading_seconds(profile: RunProfile, rows_ratio: float, workers_ratio: float, rollout_seconds: float) -> float:
    """What grading leaves after the rollout: streamed, only what the graders could not do meanwhile."""
    grader = profile.grader
    assert grader is not None
    workers = max(1.0, grader.workers * workers_ratio)
    total = grader.total_seconds * rows_ratio / workers
    longest = min(grader.max_seconds, grader.total_seconds)
    return max(longest, total - rollout_seconds) if grader.is_streamed else max(longest, total)


def _grading_capacity_seconds(profile: RunProfile, topology: Topology) -> float:
    """Seconds the graders need for one iteration's rows, hidden or not."""
    if profile.grader is None or "reward" not in topology.roles:
        return 0.0
    reward = next((task for task in profile.tasks.values() if task.role == "reward"), None)
    workers_ratio = topology.ranks_of("reward") / reward.num_ranks if reward is not None else 1.0
    rows = topology.prompts_per_iteration * topology.group_size
    rows_ratio = rows / max(1, profile.prompts_per_iteration * profile.group_size)
    return profile.grader.total_seconds * rows_ratio / max(1.0, profile.grader.workers * workers_ratio)


def _speed_up_of_tensor_parallel(profile: RunProfile, topology: Topology) -> float:
    """Cutting an engine over t times the ranks shortens a decode step, less 10 % per doubling for its collectives."""
    assert profile.rollout is not None
    before = max(1, profile.pools.get(profile.roles.get("rollout", ""), 1) // max(1, profile.rollout.num_engines))
    ratio = topology.tensor_parallel / before
    return 1.0 / (ratio * 0.9 ** max(0.0, math.log2(ratio))) if ratio >= 1 else 1.0 / ratio


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
    lengths = _drawn_lengths(edges, weights, prompts * group_size, draw)
    shares: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        shares.setdefault((row // group_size) % engines, []).append(length)
    return tuple((_decode_steps(share, slots), float(sum(share))) for share in shares.values())


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


def _path_seconds(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], owner: Mapping[str, str], last: int, begin: float
) -> dict[str, float]:
    """Working time by role on the critical path from `begin` to the end of job `last`; a queue leads to its holder.

    What lies between a job's inputs and its readiness is the controller's.
    """
    totals: dict[str, float] = {}
    index = last
    for _ in range(len(jobs)):
        job, outcome = jobs[index], outcomes[index]
        if owner[job.key]:
            totals[owner[job.key]] = totals.get(owner[job.key], 0.0) + max(0.0, outcome.end - max(begin, outcome.start))
        before = list(job.needs)
        if outcome.start <= outcome.ready + 1e-9:
            waited = outcome.ready - max(begin, outcome.ready - job.delay)
            totals[CONTROLLER] = totals.get(CONTROLLER, 0.0) + max(0.0, waited)
        else:
            before = [
                other
                for other, there in enumerate(outcomes)
                if set(jobs[other].locks) & set(job.locks) and abs(there.end - outcome.start) <= 1e-9 and other != index
            ] or before
        if not before or outcome.start <= begin:
            break
        index = max(before, key=lambda other: outcomes[other].end)
    return totals
