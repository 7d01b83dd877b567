"""What another layout would give: measured timings, rescaled, run through the event simulation.

Pure. Predicts the step time, each role's busy and idle share and the new bottleneck of any `Topology`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resources.telemetry.grading import grading_capacity_seconds, grading_seconds
from resources.telemetry.profile import RunProfile, TaskProfile
from resources.telemetry.sampling import rollout_seconds_of
from resources.telemetry.simulation import Job, Outcome, busy_seconds, simulate
from resources.telemetry.spans import CONTROLLER
from resources.telemetry.task_ranks import GRADING_TASK, VALIDATION
from resources.telemetry.topology import CPU_ROLES, Topology, measured_topology, ranks_of_task

_DRAWS = 6
"""Iterations of response lengths drawn for one prediction."""
_LATENCY_GROWTH = 0.25
"""Collectives slow by this fraction per doubling of ranks beyond the measured number: more hops, and node edges."""


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
    grading = grading_capacity_seconds(profile, topology)
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


def predict_unchanged(profile: RunProfile) -> float:
    """Seconds a step predicted for the layout that was measured: what another layout's prediction is compared with."""
    return predict(profile, measured_topology(profile)).step_seconds


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
            gate = round_index - 1 - (topology.async_depth if _is_rollout(task) and not needs else 0)
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
    ranks = ranks_of_task(task, profile, topology)
    rows_ratio = (
        topology.prompts_per_iteration
        * topology.group_size
        / max(1, profile.prompts_per_iteration * profile.group_size)
    )
    locks = [f"{pool}/fused" if topology.style_of(task.role) == "fused" else f"{pool}/{task.role}"]
    if _is_rollout(task):
        seconds = rollout_seconds * _speed_up_of_tensor_parallel(profile, topology)
    elif task.task == VALIDATION:
        seconds = task.mean_seconds  # held-out prompts are always as many
    elif task.task == GRADING_TASK and profile.grader is not None:
        seconds = grading_seconds(task, profile, topology, rows_ratio, rollout_seconds)
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


def _is_rollout(task: TaskProfile) -> bool:
    """Whether it decodes the iteration's responses; a validation has the role of the engines too."""
    return task.role == "rollout" and task.task != VALIDATION


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


def _speed_up_of_tensor_parallel(profile: RunProfile, topology: Topology) -> float:
    """Cutting an engine over t times the ranks shortens a decode step, less 10 % per doubling for its collectives."""
    assert profile.rollout is not None
    ratio = topology.tensor_parallel / profile.rollout.tensor_parallel
    return 1.0 / (ratio * 0.9 ** max(0.0, math.log2(ratio))) if ratio >= 1 else 1.0 / ratio


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
