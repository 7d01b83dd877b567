"""Where one iteration's time went: the critical path, and for each role busy / waiting for whom / transfer / idle.

Pure functions of spans. Every role's parts are a partition of the step, so they add up to it; a moment is charged once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resources.telemetry.intervals import length, subtract, union
from resources.telemetry.spans import CONTROLLER, TaskSpan
from resources.telemetry.task_ranks import count_ranks, own_ranks, role_of, role_of_rank
from resources.telemetry.timeline import BUSY, TRANSFER, Kind, Segment, TaskTimeline, Timeline, build_timeline

_LEAST_WAIT = 0.005
_WAITS_SHOWN = 4
WEIGHT_SYNC = "weight-sync"
"""The actor's task in which the engines take part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleTime:
    """One role's step, in seconds; the parts add up to it."""

    role: str
    busy: float
    transfer: float
    waiting: Mapping[str, float]
    """By whom it waited for: a role that worked meanwhile, or the controller."""
    idle: float
    """It had nothing left to do in this step."""

    @property
    def total(self) -> float:
        return self.busy + self.transfer + sum(self.waiting.values()) + self.idle


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTime:
    """One task in figures: what tables and baselines need of it."""

    task: str
    role: str
    pool: str
    start: float
    """Of execution, seconds since the step's start."""
    seconds: float
    """Of execution."""
    num_ranks: int
    skew: float
    """Largest over lower-median rank's own work; 1 when even, or with a single rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationTimes:
    """Attribution of one iteration."""

    iteration: int
    attempt: int
    started: float
    step_seconds: float
    is_complete: bool
    roles: tuple[RoleTime, ...]
    tasks: tuple[TaskTime, ...]
    path: tuple[Segment, ...] = field(default=())
    """The critical path, earliest first; it covers the step."""

    def path_seconds(self) -> dict[tuple[str, Kind], float]:
        """Critical path by (role, kind); scheduling is the controller's."""
        totals: dict[tuple[str, Kind], float] = {}
        for segment in self.path:
            role = CONTROLLER if segment.kind in (Kind.SCHEDULING, Kind.SERIALIZE, Kind.COLLECT) else segment.role
            totals[role, segment.kind] = totals.get((role, segment.kind), 0.0) + segment.seconds
        return totals


def attribute(
    tasks: Sequence[TaskSpan],
    *,
    start: float | None = None,
    end: float | None = None,
    others: Sequence[TaskSpan] = (),
    is_complete: bool = True,
) -> tuple[Timeline, IterationTimes]:
    """Attribution of one iteration's tasks over its step [start, end].

    `others` are tasks of neighbouring iterations, which count as busy where they overlap the step (async depth > 0).
    Raises ValueError for no tasks and no times.
    """
    timeline = build_timeline(tasks, start, end)
    paths = {key: timeline.path_to(key) for key in timeline.tasks}
    overlapping = [span for span in others if span.ended > timeline.start and span.started < timeline.end]
    names = list(
        dict.fromkeys(
            [task.role for task in timeline.tasks.values()]
            + [s.role for task in timeline.tasks.values() for s in task.segments if s.kind in BUSY]
            + [role for span in overlapping for role in sorted(_roles_in(span))]
        )
    )
    return timeline, IterationTimes(
        iteration=tasks[0].iteration if tasks else -1,
        attempt=tasks[0].attempt if tasks else 1,
        started=timeline.start,
        step_seconds=timeline.step_seconds,
        is_complete=is_complete,
        roles=tuple(_role_time(role, timeline, paths, overlapping) for role in names),
        tasks=tuple(_task_time(timeline, key) for key in timeline.tasks),
        path=tuple(critical_path(timeline)),
    )


def waits_text(waiting: Mapping[str, float]) -> str:
    """Whom a role waited for, the longest first; beyond four they are summed.

    >>> waits_text({"actor": 0.5, "rollout": 2.0, "queue": 0.001})
    'rollout 2.00, actor 0.50'
    """
    shown = sorted((item for item in waiting.items() if item[1] >= _LEAST_WAIT), key=lambda item: -item[1])
    parts = [f"{name} {seconds:.2f}" for name, seconds in shown[:_WAITS_SHOWN]]
    rest = sum(seconds for _, seconds in shown[_WAITS_SHOWN:])
    return ", ".join([*parts, f"others {rest:.2f}"] if rest else parts)


def critical_path(timeline: Timeline) -> list[Segment]:
    """What the step's length is made of, earliest first; the segments add up to the step."""
    last = timeline.last
    if last is None:
        return [Segment(timeline.start, timeline.end, "", CONTROLLER, Kind.SCHEDULING)]
    path = timeline.path_to(last.key)[::-1]
    if timeline.end > last.ended:
        path.append(Segment(last.ended, timeline.end, last.key, CONTROLLER, Kind.SCHEDULING))
    return path


def rank_skew(span: TaskSpan) -> float:
    """Largest over lower-median own work of the task's own ranks, all their calls together; 1 for fewer than two."""
    work = sorted(rank.work_seconds for rank in own_ranks(span))
    median = work[(len(work) - 1) // 2] if work else 0.0
    return work[-1] / median if median > 0 else 1.0


def _task_time(timeline: Timeline, key: str) -> TaskTime:
    task = timeline.tasks[key]
    return TaskTime(
        task=key,
        role=task.role,
        pool=task.span.pool,
        start=task.execute_start - timeline.start,
        seconds=task.execute_end - task.execute_start,
        num_ranks=count_ranks(task.span),
        skew=rank_skew(task.span),
    )


def _role_time(
    role: str, timeline: Timeline, paths: Mapping[str, list[Segment]], others: Sequence[TaskSpan]
) -> RoleTime:
    own = [task for task in timeline.tasks.values() if task.role == role]
    busy = [(s.start, s.end) for task in timeline.tasks.values() for s in task.segments if _is_work_of(role, s)]
    transfer = [(s.start, s.end) for task in own for s in task.segments if s.kind in TRANSFER]
    for span in others:
        if role in _roles_in(span):
            ranks = [rank for rank in span.ranks if role_of_rank(span, rank) == role]
            begin = min((rank.start for rank in ranks), default=span.started)
            end = max((rank.end for rank in ranks), default=span.ended)
            busy.append((max(begin, timeline.start), min(end, timeline.end)))
    busy = union(busy)
    transfer = subtract(union(transfer), busy)
    free = subtract([(timeline.start, timeline.end)], union(busy + transfer))
    waiting: dict[str, float] = {}
    if role == "rollout":  # the engines stand still while their next weights come
        syncing = union([(s.start, s.end) for t in timeline.tasks.values() for s in t.segments if _is_sync(t, s)])
        left = subtract(free, syncing)
        if length(left) < length(free):
            waiting["weights"] = length(free) - length(left)
        free = left
    idle = 0.0
    for begin, end in free:
        idle += _charge_waits(begin, end, [task.key for task in own], timeline, paths, waiting)
    return RoleTime(role=role, busy=length(busy), transfer=length(transfer), waiting=waiting, idle=idle)


def _roles_in(span: TaskSpan) -> set[str]:
    """Roles whose ranks worked for the task; its own where it had none."""
    return {role_of_rank(span, rank) for rank in span.ranks} or {role_of(span)}


def _is_work_of(role: str, segment: Segment) -> bool:
    return segment.role == role and segment.kind in BUSY


def _is_sync(task: TaskTimeline, segment: Segment) -> bool:
    return task.span.task == WEIGHT_SYNC and segment.kind in BUSY


def _charge_waits(
    begin: float,
    end: float,
    own: Sequence[str],
    timeline: Timeline,
    paths: Mapping[str, list[Segment]],
    waiting: dict[str, float],
) -> float:
    """Charges the free stretch to what the role's next task waited for; returns seconds without a next task."""
    cursor = begin
    while cursor < end:
        following = [timeline.tasks[key] for key in own if timeline.tasks[key].ended > cursor]
        if not following:
            return end - cursor
        task = min(following, key=lambda candidate: candidate.execute_start)
        until = min(end, task.ended)
        for segment in paths[task.key]:
            seconds = min(until, segment.end) - max(cursor, segment.start)
            if seconds > 0:
                whom = _blamed(segment, task.role)
                waiting[whom] = waiting.get(whom, 0.0) + seconds
        cursor = until
    return 0.0


def _blamed(segment: Segment, waiter: str) -> str:
    if segment.kind in (Kind.SCHEDULING, Kind.SERIALIZE, Kind.COLLECT):
        return CONTROLLER
    if segment.kind is Kind.WEIGHTS:
        return "weights"
    if segment.kind is Kind.QUEUE:
        return "queue" if segment.role == waiter else segment.role
    return segment.role
