"""What a run measured of each role, in the form the simulator needs: distributions, and how they scale.

Pure. A task's time is split into a part that shrinks with more ranks and fewer rows, a part that does not, and
collectives; a rollout into decode steps and tokens. What was not measured is assumed, and `assumptions` says so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.telemetry.reader import IterationRecord
from resources.telemetry.rollout_gauge import expected_decode_steps, fit_decode_cost, next_edge
from resources.telemetry.spans import RankSpan, RunRecord, TaskSpan
from resources.telemetry.task_ranks import (
    VALIDATION,
    count_ranks,
    engine_calls,
    grading_stretch_seconds,
    is_rollout,
    own_ranks,
    role_of,
    stages,
)
from resources.telemetry.timeline import Kind, TaskTimeline, Timeline, build_timeline

_MAX_ITERATIONS = 64
_MIN_SPREAD = 0.2
"""Tokens must differ by this fraction between ranks or iterations before an intercept can be fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProfile:
    """One task, per iteration, as measured on `num_ranks` ranks; how long a rollout decodes, `RolloutProfile` says."""

    task: str
    role: str
    upstream: tuple[str, ...]
    num_ranks: int
    seconds: tuple[float, ...]
    """Own work of the mean rank, one entry an iteration it ran in; of a validation all that it took."""
    fixed_seconds: float = 0.0
    """Of it, what neither more ranks nor fewer rows shorten: optimizer steps, call overhead."""
    communication_seconds: float = 0.0
    micro_batches: float = 0.0
    """Of a rank; each has its collectives, since sharded weights are gathered anew. 0 when unknown."""
    skew: float = 1.0
    """Slowest over mean rank, mean over iterations."""
    cores_per_rank: float = 0.0
    """CPU seconds of a rank per second of its execution: 0 for a worker that sleeps or only drives an accelerator."""
    overhead_seconds: float = 0.0
    """Scheduling between its last upstream task and its work, and after it."""
    transfer_seconds: float = 0.0
    """Serialising, fetching and collecting; grows with the rows."""
    frequency: float = 1.0
    """Iterations in which it ran."""
    memory_bytes: float = 0.0
    """Peak of a rank."""

    @property
    def mean_seconds(self) -> float:
        return sum(self.seconds) / len(self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutProfile:
    """Decoding: `seconds = step_seconds * steps + token_seconds * tokens + overhead_seconds` of one engine."""

    num_engines: int
    step_seconds: float
    token_seconds: float
    overhead_seconds: float
    slots: int
    length_edges: tuple[int, ...]
    """Ascending lower edges of response lengths; the last one is the longest response seen."""
    length_weights: tuple[float, ...]
    """Share of responses in [edge, next edge); sums to 1."""
    tensor_parallel: int = 1
    """Ranks of an engine as it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraderProfile:
    """Grading of one iteration's rows. Reward models are no part of it: they are the reward task's own work."""

    total_seconds: float
    max_seconds: float
    workers: int
    is_streamed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProfile:
    """Everything the simulator starts from."""

    tasks: Mapping[str, TaskProfile]
    rollout: RolloutProfile | None
    grader: GraderProfile | None
    pools: Mapping[str, int]
    """Ranks of each pool."""
    accelerator_pools: frozenset[str]
    roles: Mapping[str, str]
    colocate: Mapping[str, str]
    cores: float
    """Of all nodes together; 0 when unknown, which the simulator takes as plenty."""
    prompts_per_iteration: int
    group_size: int
    async_depth: int = 0
    tail_seconds: float = 0.0
    """Between the last task and the end of the iteration."""
    measured_step_seconds: float = 0.0
    accelerator_bytes: float = 0.0
    sync_seconds_split: float | None = None
    """Weight sync between pools, where it is known apart from the measured one."""
    sync_seconds_fused: float | None = None
    switch_seconds: float = 0.0
    """An accelerator that decodes and trains changes over once each way: caches freed and made, weights moved."""
    assumptions: tuple[str, ...] = ()


def measure_profile(records: Iterable[IterationRecord], run: RunRecord | None = None) -> RunProfile:
    """Profile of the last 64 complete iterations, the first left out as warm-up where there are three or more.

    Raises ValueError if no iteration is complete.
    """
    complete = [record for record in records if record.span is not None and record.tasks]
    latest = {record.iteration: record for record in complete}  # a later attempt replaces an earlier one
    chosen = [latest[number] for number in sorted(latest)][-_MAX_ITERATIONS:]
    if len(chosen) >= 3:
        chosen = chosen[1:]
    if not chosen:
        raise ValueError("no iteration of this run is complete; a what-if needs at least one that ended")
    return _profile_of(chosen, run)


@dataclass(slots=True)
class _Seen:
    """A task over the iterations."""

    spans: list[TaskSpan] = field(default_factory=list)
    timelines: list[TaskTimeline] = field(default_factory=list)


def _profile_of(records: Sequence[IterationRecord], run: RunRecord | None) -> RunProfile:
    seen: dict[str, _Seen] = defaultdict(_Seen)
    timelines: list[Timeline] = []
    for record in records:
        assert record.span is not None
        timeline = build_timeline(record.tasks, record.span.started, record.span.ended)
        timelines.append(timeline)
        for task in timeline.tasks.values():
            seen[task.span.task].spans.append(task.span)
            seen[task.span.task].timelines.append(task)
    notes: list[str] = []
    tasks = {name: _task_profile(name, entry, len(records), notes) for name, entry in seen.items()}
    rollout_spans = [span for entry in seen.values() for span in entry.spans if is_rollout(span)]
    rows = max((_rows(span) for span in rollout_spans), default=0)
    group_size = (run.group_size if run is not None else 0) or _group_size(rollout_spans)
    prompts = (run.prompts_per_iteration if run is not None else 0) or max(1, rows // group_size)
    pools = {name: pool.ranks for name, pool in run.pools.items()} if run is not None and run.pools else {}
    for entry in seen.values():
        pools.setdefault(entry.spans[-1].pool, max(1, count_ranks(entry.spans[-1])))
    roles = {tasks[name].role: entry.spans[-1].pool for name, entry in reversed(seen.items())}
    accelerated = frozenset(
        name for name, pool in (run.pools if run is not None else {}).items() if pool.accelerator != "none"
    )
    if run is None or not run.cores_per_node:
        notes.append("cores per node are unknown: taken as plenty")
    tails = [
        timeline.end - (timeline.last.ended if timeline.last is not None else timeline.end) for timeline in timelines
    ]
    return RunProfile(
        tasks=tasks,
        rollout=_rollout_profile(rollout_spans, run, notes),
        grader=_grader_profile([span for entry in seen.values() for span in entry.spans]),
        pools=pools,
        accelerator_pools=accelerated,
        roles=roles,
        colocate=dict(run.colocate) if run is not None else {},
        cores=run.cores_per_node * _num_nodes(records[-1].tasks, run) if run is not None else 0.0,
        prompts_per_iteration=prompts,
        group_size=group_size,
        async_depth=run.async_depth if run is not None else 0,
        tail_seconds=sum(tails) / len(tails),
        measured_step_seconds=sum(timeline.step_seconds for timeline in timelines) / len(timelines),
        accelerator_bytes=float(run.accelerator_bytes) if run is not None else 0.0,
        assumptions=tuple(dict.fromkeys(notes)),
    )


def _num_nodes(tasks: Sequence[TaskSpan], run: RunRecord) -> int:
    """Nodes on which hosts and ranks of the latest iteration stood: pools may share nodes, or have their own."""
    seen = {node for task in tasks for node in (task.node, *(rank.node for rank in task.ranks)) if node}
    return max([1, len(seen), *(pool.nodes for pool in run.pools.values())])


def _rows(span: TaskSpan) -> int:
    return int(span.facts.get("rows", 0)) or int(sum(rank.facts.get("rows", 0) for rank in own_ranks(span)))


def _group_size(spans: Sequence[TaskSpan]) -> int:
    return max((int(span.facts.get("group_size", 1)) for span in spans), default=1)


def _task_profile(name: str, entry: _Seen, num_iterations: int, notes: list[str]) -> TaskProfile:
    spans = entry.spans
    staged = [[[own_ranks(span)]] if is_rollout(span) else stages(span) for span in spans]
    ranks = [rank for found in staged for stage in found for group in stage for rank in group]
    means, skews = [], []
    for found, timeline in zip(staged, entry.timelines, strict=True):
        mean = _in_stages(found, lambda group: sum(rank.work_seconds for rank in group) / len(group))
        longest = _in_stages(found, lambda group: max(rank.work_seconds for rank in group))
        is_whole = not mean or name == VALIDATION
        means.append(timeline.seconds(Kind.EXECUTE) if is_whole else mean)
        skews.append(1.0 if is_whole else longest / mean)
    execute = sum(rank.execute_seconds for rank in ranks)
    cpu = sum(rank.cpu_seconds for rank in ranks)
    if not cpu and role_of(spans[-1]) not in ("reward",):
        notes.append("CPU seconds of some ranks are unknown: they are taken to share no cores")
    communication = [
        _in_stages(found, lambda group: min(rank.communication_seconds for rank in group)) for found in staged
    ]
    count = len(spans)
    return TaskProfile(
        task=name,
        role=role_of(spans[-1]),
        upstream=spans[-1].upstream,
        num_ranks=max(1, count_ranks(spans[-1])),
        seconds=tuple(means),
        fixed_seconds=min(_fixed_seconds(ranks), min(means)),
        communication_seconds=sum(communication) / count,
        micro_batches=sum(float(rank.facts.get("micro_batches", 0)) for rank in ranks) / max(1, len(ranks)),
        skew=sum(skews) / count,
        cores_per_rank=cpu / execute if execute > 0 else 0.0,
        overhead_seconds=sum(t.seconds(Kind.SCHEDULING) for t in entry.timelines) / count,
        transfer_seconds=sum(
            t.seconds(kind) for t in entry.timelines for kind in (Kind.SERIALIZE, Kind.FETCH, Kind.COLLECT)
        )
        / count,
        frequency=min(1.0, count / num_iterations),
        memory_bytes=max((float(rank.facts.get("peak_memory_bytes", 0)) for rank in ranks), default=0.0),
    )


def _in_stages(found: Sequence[Sequence[Sequence[RankSpan]]], seconds: Callable[[Sequence[RankSpan]], float]) -> float:
    """Of a task whose duties worked in stages: of each stage the longest duty's, added up."""
    return sum(max((seconds(group) for group in stage if group), default=0.0) for stage in found)


def _fixed_seconds(ranks: Sequence[RankSpan]) -> float:
    """Optimizer time, and the intercept of the rest over tokens where these vary enough to tell."""
    if not ranks:
        return 0.0
    optimizer = sum(rank.optimizer_seconds for rank in ranks) / len(ranks)
    points = [
        (float(rank.facts["tokens"]), rank.work_seconds - rank.optimizer_seconds)
        for rank in ranks
        if rank.facts.get("tokens")
    ]
    if len(points) < 3 or max(x for x, _ in points) < (1 + _MIN_SPREAD) * min(x for x, _ in points):
        return optimizer
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return optimizer + max(0.0, min(mean_y - max(0.0, slope) * mean_x, mean_y))


def _rollout_profile(spans: Sequence[TaskSpan], run: RunRecord | None, notes: list[str]) -> RolloutProfile | None:
    """Decode cost from the gauges, or fitted over engines and iterations; lengths pooled over both."""
    ranks = [rank for span in spans for call in engine_calls(span) for rank in call]
    if not ranks:
        return None
    last = next(span for span in reversed(spans) if own_ranks(span))
    called, engines = count_ranks(last), len(own_ranks(last))
    tensor_parallel = (run.rollout_tensor_parallel if run is not None else 0) or max(1, called // engines)
    behind = max(1, run.rollout_engines) if run is not None and called == 1 else 1  # servers have one front for all
    edges, weights = _lengths([rank.facts for rank in ranks] + [span.facts for span in spans])
    points = [_decode_point(rank.facts, rank.work_seconds, behind) for rank in ranks]
    points = [point for point in points if point[0] > 0]
    gauged = [rank.facts for rank in ranks if {"decode_step_seconds", "decode_token_seconds"} <= rank.facts.keys()]
    if gauged:
        step = sum(facts["decode_step_seconds"] for facts in gauged) / len(gauged)
        token = sum(facts["decode_token_seconds"] for facts in gauged) / len(gauged)
    else:
        sums = [0.0] * 5
        for steps, tokens, seconds in points:
            for index, product in enumerate((steps**2, steps * tokens, tokens**2, steps * seconds, tokens * seconds)):
                sums[index] += product
        step, token = fit_decode_cost(sums) or (0.0, 0.0)
        notes.append("decode cost was fitted over whole rollouts: the engine reported no running counts")
    left = [seconds - step * steps - token * tokens for steps, tokens, seconds in points]
    return RolloutProfile(
        num_engines=engines * behind,
        step_seconds=step,
        token_seconds=token,
        overhead_seconds=max(0.0, sum(left) / len(left)) if left else 0.0,
        slots=(run.max_running_sequences if run is not None else 0)
        or max((int(rank.facts.get("slots", 0)) for rank in ranks), default=0)
        or 256,
        length_edges=edges,
        length_weights=weights,
        tensor_parallel=tensor_parallel,
    )


def _decode_point(facts: Mapping[str, Any], seconds: float, engines: int) -> tuple[float, float, float]:
    """(steps, tokens, seconds) of one engine's rollout, of the `engines` that a rank speaks for; more rows than slots
    decode in waves."""
    rows, longest = float(facts.get("rows", 0)) / engines, float(facts.get("response_length_max", 0))
    tokens = float(facts.get("response_length_mean", 0.0)) * rows
    slots = float(facts.get("slots", 0)) or rows
    steps = facts.get("decode_steps")
    if steps is None:
        steps = expected_decode_steps(tokens, longest, slots) if rows > slots else longest
    return (float(steps), tokens, seconds)


def _lengths(sources: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    counts: dict[int, float] = defaultdict(float)
    longest = 1
    for facts in sources:
        for edge, count in facts.get("response_length_histogram", {}).items():
            counts[int(edge)] += count
        longest = max(longest, int(facts.get("response_length_max", 1)))
    if not counts:
        counts[longest] = 1.0
    for edge in [edge for edge in counts if next_edge(edge) < longest]:
        counts.setdefault(next_edge(edge), 0.0)  # lengths between two buckets that nobody had are not drawn
    ordered = sorted(counts)
    total = sum(counts.values())
    return (*ordered, max(longest, ordered[-1])), tuple(counts[edge] / total for edge in ordered)


def _overlap(span: TaskSpan, graders: Sequence[Mapping[str, Any]]) -> int:
    """Calls that were under way at once, on average: graders that sleep get more processes than are configured."""
    exposed = grading_stretch_seconds(span) if span.ranks else span.ended - span.started
    wall = float(span.facts.get("hidden_seconds", 0.0)) + exposed
    return int(sum(grader["total_seconds"] for grader in graders) / wall) if wall > 0 else 1


def _grader_profile(spans: Iterable[TaskSpan]) -> GraderProfile | None:
    """Of the tasks that graded: the reward task, and a rollout that needs its scores."""
    graded = [(span, [grader for grader in span.graders if grader.get("kind") != "model"]) for span in spans]
    graded = [(span, graders) for span, graders in graded if graders]
    if not graded:
        return None
    longest: dict[int, float] = defaultdict(float)
    for span, graders in graded:
        longest[span.iteration] = max(longest[span.iteration], *(grader["max_seconds"] for grader in graders))
    every = [grader for _, graders in graded for grader in graders]
    return GraderProfile(
        total_seconds=sum(grader["total_seconds"] for grader in every) / len(longest),
        max_seconds=sum(longest.values()) / len(longest),
        workers=max([*(int(grader.get("workers", 1)) for grader in every), *(_overlap(*one) for one in graded)]),
        is_streamed=any(span.facts.get("hidden_seconds", 0.0) for span, _ in graded),
    )
