"""Time line of one iteration: each task cut into segments, linked to what it waited for.

Pure. Times are clipped to the step, so the segments on any path back to its start add up to the step exactly.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from resources.telemetry.intervals import Interval, overlap
from resources.telemetry.spans import CONTROLLER, TaskSpan
from resources.telemetry.task_ranks import lent_stretches, queue_seconds, role_of, role_of_duty

_QUEUE_EVIDENCE_SECONDS = 0.001
"""A measured queue wait below this is no reason to link a task to the one before it on its pool."""


class Kind(StrEnum):
    """What a segment of a task's time line is."""

    SCHEDULING = "scheduling"
    """All it needed was there, and nothing of it ran: runner, engine, message latency."""
    WEIGHTS = "weights"
    QUEUE = "queue"
    SERIALIZE = "serialize"
    FETCH = "fetch"
    EXECUTE = "execute"
    COLLECT = "collect"


BUSY = frozenset({Kind.EXECUTE})
TRANSFER = frozenset({Kind.FETCH, Kind.SERIALIZE, Kind.COLLECT})
_BEFORE = (Kind.SCHEDULING, Kind.WEIGHTS, Kind.QUEUE, Kind.SERIALIZE, Kind.FETCH, Kind.EXECUTE)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time and what it went to."""

    start: float
    end: float
    task: str
    role: str
    kind: Kind

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Edge:
    """`task` had to be over first; a pool edge binds only until its ranks were free again."""

    task: str
    is_pool: bool = False


@dataclass(frozen=True, slots=True)
class TaskTimeline:
    """One task: `segments` are contiguous from `ready` to `ended`."""

    key: str
    span: TaskSpan
    edges: tuple[Edge, ...]
    predecessor: Edge | None
    """The edge that was over last: the critical path goes back through it."""
    ready: float
    execute_start: float
    execute_end: float
    ended: float
    segments: tuple[Segment, ...]
    durations: Mapping[Kind, float]
    """Seconds by kind, but for `after_seconds`."""
    after_seconds: float
    """Scheduling after the answers were collected."""

    @property
    def role(self) -> str:
        return role_of(self.span)

    def seconds(self, kind: Kind) -> float:
        return self.durations[kind] + (self.after_seconds if kind is Kind.SCHEDULING else 0.0)

    def execute_seconds_of(self, role: str) -> float:
        """Of its execution, what is `role`'s: a step may ask others to grade while it samples."""
        return sum(s.end - s.start for s in self.segments if s.kind is Kind.EXECUTE and s.role == role)

    def free_at(self, edge: Edge) -> float:
        """When this task stops holding up the one behind `edge`."""
        return self.execute_end if edge.is_pool else self.ended


@dataclass(frozen=True, slots=True)
class Timeline:
    """All tasks of an iteration within its step [start, end], in order of execution."""

    start: float
    end: float
    tasks: Mapping[str, TaskTimeline]

    @property
    def step_seconds(self) -> float:
        return self.end - self.start

    @property
    def last(self) -> TaskTimeline | None:
        return max(self.tasks.values(), key=lambda task: task.ended, default=None)

    def path_to(self, key: str) -> list[Segment]:
        """Segments from the step's start up to the end of task `key`, latest first, without gap or overlap."""
        path: list[Segment] = []
        task, cursor = self.tasks[key], self.tasks[key].ended
        while True:
            for segment in reversed(task.segments):
                end = min(segment.end, cursor)
                if end > segment.start:
                    path.append(Segment(segment.start, end, segment.task, segment.role, segment.kind))
            cursor = min(cursor, task.ready)
            if task.predecessor is None:
                break
            task = self.tasks[task.predecessor.task]
        if cursor > self.start:
            path.append(Segment(self.start, cursor, task.key, CONTROLLER, Kind.SCHEDULING))
        return path


def build_timeline(tasks: Sequence[TaskSpan], start: float | None = None, end: float | None = None) -> Timeline:
    """Time line of one iteration's tasks; without `start` and `end`, from the first submission to the last end.

    Raises ValueError for an iteration without tasks and without both times.
    """
    if not tasks and (start is None or end is None):
        raise ValueError("an iteration without tasks has no time line; give its start and end")
    begin = (
        start
        if start is not None
        else min(min(t.started, t.submitted if t.submitted is not None else t.started) for t in tasks)
    )
    finish = end if end is not None else max(t.ended for t in tasks)
    finish = max(begin, finish)
    ordered = sorted(tasks, key=_first_work)
    sending = [
        (t.submitted, t.submitted + t.dispatch.seconds)
        for t in ordered
        if t.submitted is not None and t.dispatch.seconds
    ]
    keys: dict[str, int] = {}
    built: dict[str, TaskTimeline] = {}
    for span in ordered:
        keys[span.task] = keys.get(span.task, 0) + 1
        key = span.task if keys[span.task] == 1 else f"{span.task}#{keys[span.task]}"
        built[key] = _task_timeline(key, span, built, sending, begin, finish)
    return Timeline(begin, finish, built)


def _first_work(span: TaskSpan) -> float:
    return min((rank.start for rank in span.ranks), default=span.started)


def _clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def _task_timeline(
    key: str,
    span: TaskSpan,
    earlier: Mapping[str, TaskTimeline],
    sending: Sequence[Interval],
    begin: float,
    finish: float,
) -> TaskTimeline:
    started = _clip(span.started, begin, finish)
    ended = _clip(span.ended, started, finish)
    execute_start = _clip(
        min((r.start for r in span.ranks), default=span.started + span.dispatch.seconds), started, ended
    )
    execute_end = _clip(
        max((r.end for r in span.ranks), default=span.ended - span.collect.seconds), execute_start, ended
    )
    edges = [Edge(name) for name in _latest_keys(span.upstream, earlier)]
    queue = queue_seconds(span)
    if queue >= _QUEUE_EVIDENCE_SECONDS:
        edges += _pool_edges(span, earlier, {edge.task for edge in edges}, begin, execute_start)
    predecessor = max(edges, key=lambda edge: earlier[edge.task].free_at(edge), default=None)
    ready = begin if predecessor is None else min(earlier[predecessor.task].free_at(predecessor), execute_start)
    role = role_of(span)
    segments = [
        *_segments_before(key, role, span, queue, sending, ready, execute_start),
        *_segments_during(key, role, span, execute_start, execute_end),
    ]
    collected = min(execute_end + span.collect.seconds, ended)
    segments += [
        Segment(execute_end, collected, key, role, Kind.COLLECT),
        Segment(collected, ended, key, role, Kind.SCHEDULING),
    ]
    kept = tuple(segment for segment in segments if segment.end > segment.start)
    durations = dict.fromkeys(Kind, 0.0)
    for segment in kept:
        durations[segment.kind] += segment.end - segment.start
    after = ended - collected
    durations[Kind.SCHEDULING] -= after
    return TaskTimeline(
        key, span, tuple(edges), predecessor, ready, execute_start, execute_end, ended, kept, durations, after
    )


def _latest_keys(names: Iterable[str], earlier: Mapping[str, TaskTimeline]) -> list[str]:
    """Keys of upstream tasks; of a task that ran several times in the iteration, all runs so far."""
    return [key for key in earlier for name in names if key == name or key.startswith(name + "#")]


def _pool_edges(
    span: TaskSpan, earlier: Mapping[str, TaskTimeline], upstream: set[str], begin: float, execute_start: float
) -> list[Edge]:
    """The task that held this one's pool until shortly before it ran, if there is one.

    Ranks come free one by one, and the first that is may begin this task while the holder still runs on the others.
    """
    ready = max((earlier[name].ended for name in upstream), default=begin)
    holders = [
        key
        for key, other in earlier.items()
        if key not in upstream
        and other.span.pool == span.pool
        and ready < other.execute_end
        and _first_free(other) <= execute_start
    ]
    if not holders:
        return []
    return [Edge(max(holders, key=lambda key: earlier[key].execute_end), is_pool=True)]


def _first_free(task: TaskTimeline) -> float:
    """When the first of its own ranks was through, with all its calls."""
    ends: dict[int, float] = {}
    for rank in task.span.ranks:
        if not rank.duty or role_of_duty(rank.duty) == task.role:
            ends[rank.rank] = max(ends.get(rank.rank, rank.end), rank.end)
    return min(ends.values(), default=task.execute_end)


def _segments_before(
    key: str,
    role: str,
    span: TaskSpan,
    queue: float,
    sending: Sequence[Interval],
    ready: float,
    execute_start: float,
) -> list[Segment]:
    """[ready, execute_start] from its end: serialise, queue, weights as far as measured; what is left is scheduling."""
    segments: list[Segment] = []
    cursor = execute_start
    weights, queued_weights = _weights_seconds(span, queue, ready, execute_start)
    for kind, seconds in (
        (Kind.SERIALIZE, _serialize_seconds(span, sending, ready, execute_start)),
        (Kind.QUEUE, queue - queued_weights),
        (Kind.WEIGHTS, weights),
    ):
        begin = max(ready, cursor - seconds)
        segments.append(Segment(begin, cursor, key, role, kind))
        cursor = begin
    segments.append(Segment(ready, cursor, key, CONTROLLER, Kind.SCHEDULING))
    return segments[::-1]


def _weights_seconds(span: TaskSpan, queue: float, ready: float, execute_start: float) -> tuple[float, float]:
    """(seconds of [ready, execute_start] in which the weights were still on their way, those of them in the queue).

    An engine that took its weights before the task was ready held up nobody. Without an engine's own account, what the
    task says.
    """
    ranks = [rank for rank in span.ranks if {"weights_seconds", "weights_age_seconds"} <= rank.facts.keys()]
    if not ranks:
        return span.waits.weights, 0.0
    last = min(ranks, key=lambda rank: rank.facts["weights_age_seconds"])
    ended = last.start - last.facts["weights_age_seconds"]
    loading = (ended - last.facts["weights_seconds"], ended)
    return overlap(loading, (ready, execute_start)), overlap(loading, (execute_start - queue, execute_start))


def _serialize_seconds(span: TaskSpan, sending: Sequence[Interval], ready: float, execute_start: float) -> float:
    """Serialising after the inputs were there: the controller's, of this task and of those it sent before, and what the
    task's host unpacked. What the controller did ahead held up nobody; a span that started before the controller
    could be through did it in its host."""
    own, unpacked = span.dispatch.seconds, span.dispatch.unpack_seconds
    if span.submitted is None or span.started < span.submitted + own:
        return own + unpacked
    sent = min(span.submitted + own, execute_start)
    return unpacked + sum(overlap(one, (ready, sent)) for one in sending)


def _segments_during(key: str, role: str, span: TaskSpan, execute_start: float, execute_end: float) -> list[Segment]:
    """What ranks of another role did alone is that role's: the grading between two rounds of a rollout."""
    last = max(span.ranks, key=lambda rank: rank.end, default=None)
    fetched = min(execute_start + (last.transfer_seconds if last is not None else 0.0), execute_end)
    segments = [Segment(execute_start, fetched, key, role, Kind.FETCH)]
    cursor = fetched
    for start, end, other in lent_stretches(span, fetched, execute_end):
        segments.append(Segment(cursor, start, key, role, Kind.EXECUTE))
        segments.append(Segment(start, end, key, other, Kind.EXECUTE))
        cursor = end
    return [*segments, Segment(cursor, execute_end, key, role, Kind.EXECUTE)]


Reductions = Mapping[tuple[str, Kind], float]
"""Seconds to take off a task's segments of one kind, by (task key, kind)."""


def replay_seconds(
    timeline: Timeline, reductions: Reductions, *, gap_reduction: float = 0.0, freed: Collection[str] = ()
) -> float:
    """Step time if the given segments had been shorter, everything else as measured.

    Each task starts when the last of its edges is free: a wait hidden behind another one saves nothing. `gap_reduction`
    (0 to 1) takes off that share of the time between the last task and the end of the step. `freed` tasks do not queue
    behind others on their pool.
    """
    free: dict[Edge, float] = {}
    latest = timeline.start
    for key, task in timeline.tasks.items():
        edges = [edge for edge in task.edges if not (edge.is_pool and key in freed)]
        now = max((free[edge] for edge in edges), default=timeline.start)
        if task.predecessor in edges and task.predecessor is not None:  # overlaps that were cut stay cut
            now -= max(0.0, timeline.tasks[task.predecessor.task].free_at(task.predecessor) - task.ready)
        for kind in _BEFORE:
            now += max(0.0, task.durations[kind] - reductions.get((key, kind), 0.0))
        spare = reductions.get((key, Kind.SCHEDULING), 0.0) - task.durations[Kind.SCHEDULING]
        after = max(0.0, task.after_seconds - max(0.0, spare))
        collect = max(0.0, task.durations[Kind.COLLECT] - reductions.get((key, Kind.COLLECT), 0.0))
        free[Edge(key, is_pool=True)] = now
        now += collect + after
        free[Edge(key)] = now
        latest = max(latest, now)
    last = timeline.last
    tail = timeline.end - (last.ended if last is not None else timeline.start)
    return latest - timeline.start + tail * (1.0 - gap_reduction)
