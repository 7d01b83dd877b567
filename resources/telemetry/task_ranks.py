"""The ranks of a task: whose they are, each once however often it was called, and which of them are engines.

Pure. A step may call its ranks several times (refills, a greedy baseline) and ranks of other duties (grading while it
samples). Only ranks of one duty are compared, by all that each did in the task.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from resources.telemetry.intervals import Interval, length, overlap, subtract, union
from resources.telemetry.spans import RankSpan, TaskSpan

VALIDATION = "validation"
"""The task of the engines that is no rollout: its prompts are always the same, and it grades them itself."""
GRADING_TASK = "reward"
"""The task that waits for the graders: others of the role, as the one that writes samples, grade nothing."""
_ROLE_OF_DUTY = {"reward_model": "reward", "judge": "reward"}
_SUMMED = frozenset({"tokens", "rows", "micro_batches", "preemptions", "starved_seconds"})
"""Facts of a rank's calls that add up; of others the highest counts where the name says so, else the first."""


def role_of(span: TaskSpan) -> str:
    """The span's role; for versions that did not record it, the first word of the task's name."""
    return span.role or span.task.replace("_", "-").split("-")[0]


def role_of_duty(duty: str) -> str:
    """
    >>> [role_of_duty(duty) for duty in ("actor", "teacher.maths", "reward_model.rm")]
    ['actor', 'teacher', 'reward']
    """
    name = duty.partition(".")[0]
    return _ROLE_OF_DUTY.get(name, name)


def role_of_rank(span: TaskSpan, rank: RankSpan) -> str:
    """Whose seconds the rank's are: the task's role, unless it was asked for another duty."""
    return role_of_duty(rank.duty) if rank.duty else role_of(span)


def is_rollout(span: TaskSpan) -> bool:
    """Whether it samples what is trained on."""
    return role_of(span) == "rollout" and span.task != VALIDATION


def ranks_by_duty(span: TaskSpan) -> dict[str, list[RankSpan]]:
    """Duty -> its ranks, each once, with what it did in all its calls; the task's own duty is its role.

    A tensor-parallel peer for which another rank answers tells nothing of itself, not even what it waited in
    collectives: beside ranks that do it is left out.
    """
    if not any(rank.duty for rank in span.ranks):
        return {role_of(span): _each_once(span.ranks)} if span.ranks else {}
    found: dict[str, list[RankSpan]] = defaultdict(list)
    for rank in span.ranks:
        found[rank.duty or role_of(span)].append(rank)
    return {duty: _each_once(ranks) for duty, ranks in found.items()}


def own_ranks(span: TaskSpan) -> list[RankSpan]:
    """The ranks of the task's own duty, each once."""
    return ranks_by_duty(span).get(role_of(span), [])


def count_ranks(span: TaskSpan) -> int:
    """Ranks that were called for the task's own duty, peers too; of all duties where it has none (teachers)."""
    own = {rank.rank for rank in span.ranks if (rank.duty or role_of(span)) == role_of(span)}
    return len(own) or len({(rank.duty, rank.rank) for rank in span.ranks})


def stages(span: TaskSpan) -> list[list[list[RankSpan]]]:
    """The ranks of each duty, by stages: duties that worked side by side are one, what came after them the next."""
    found = ranks_by_duty(span)
    if len(found) < 2:
        return [list(found.values())] if found else []
    busy = {duty: _busy(span, duty) for duty in found}
    ordered: list[list[str]] = []
    for duty in sorted(found, key=lambda duty: busy[duty]):
        if ordered and any(_do_overlap(busy[duty], busy[other]) for other in ordered[-1]):
            ordered[-1].append(duty)
        else:
            ordered.append([duty])
    return [[found[duty] for duty in stage] for stage in ordered]


def held_alone_seconds(span: TaskSpan, duty: str) -> float:
    """How much sooner the task could be over if this duty's ranks were: what ran beside them may last as long."""
    mine = _busy(span, duty)
    beside = [
        theirs[-1][1]
        for other in ranks_by_duty(span)
        if other != duty and _do_overlap(theirs := _busy(span, other), mine)
    ]
    return max(0.0, mine[-1][1] - max(beside, default=mine[0][0])) if mine else 0.0


def engine_calls(span: TaskSpan) -> list[list[RankSpan]]:
    """The calls of a rollout's engines in their order, each with a span an engine; peers of an engine are none."""
    own = [rank for rank in span.ranks if (rank.duty or role_of(span)) == role_of(span)]
    calls: list[list[RankSpan]] = []
    called: Counter[int] = Counter()
    for rank in _told(own):
        if called[rank.rank] == len(calls):
            calls.append([])
        calls[called[rank.rank]].append(rank)
        called[rank.rank] += 1
    return calls


def queue_seconds(span: TaskSpan) -> float:
    """Longest that a rank waited for its worker before anything of the task ran; later calls wait within the task."""
    if not span.ranks:
        return span.waits.queue
    first = min(rank.start for rank in span.ranks)
    return max(
        (rank.queue_seconds for rank in span.ranks if rank.start - rank.queue_seconds <= first + 1e-6), default=0.0
    )


def lent_stretches(span: TaskSpan, begin: float, end: float) -> list[tuple[float, float, str]]:
    """(start, end, role) of the stretches in which only ranks of another role worked for this task, ascending."""
    if not any(rank.duty for rank in span.ranks):
        return []
    by_role: dict[str, list[Interval]] = defaultdict(list)
    for rank in span.ranks:
        by_role[role_of_rank(span, rank)].append((max(rank.start, begin), min(rank.end, end)))
    taken = union(by_role.pop(role_of(span), []))
    found: list[tuple[float, float, str]] = []
    for role, intervals in by_role.items():
        free = subtract(union(intervals), taken)
        taken = union([*taken, *free])
        found += [(start, until, role) for start, until in free]
    return sorted(found)


def grading_stretch_seconds(span: TaskSpan) -> float:
    """Seconds in which reward workers graded for this task, without the reward models', which are asked before."""
    return length(_busy(span, "reward"))


def _busy(span: TaskSpan, duty: str) -> list[Interval]:
    """When any rank of the duty was at work."""
    return union((rank.start, rank.end) for rank in span.ranks if (rank.duty or role_of(span)) == duty)


def _do_overlap(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    return any(overlap(mine, theirs) > 0 for mine in one for theirs in other)


def _told(ranks: Sequence[RankSpan]) -> list[RankSpan]:
    """Those that tell of themselves; all where none does."""
    return [rank for rank in ranks if rank.facts] or list(ranks)


def _each_once(ranks: Sequence[RankSpan]) -> list[RankSpan]:
    told = _told(ranks)
    if len({rank.rank for rank in told}) == len(told):
        return told
    by_rank: dict[int, list[RankSpan]] = defaultdict(list)
    for rank in told:
        by_rank[rank.rank].append(rank)
    return [_added_up(calls) for calls in by_rank.values()]


def _added_up(calls: Sequence[RankSpan]) -> RankSpan:
    """One span of a rank's calls: it starts with the first and lasts as long as all of them executed."""
    if len(calls) == 1:
        return calls[0]
    times = {
        name: sum(getattr(call, name) for call in calls)
        for name in (
            "transfer_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "communication_seconds",
            "cpu_seconds",
        )
    }  # fmt: skip
    end = calls[0].start + sum(call.execute_seconds for call in calls)
    return replace(calls[0], end=end, facts=_joined_facts([call.facts for call in calls]), **times)


def _joined_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for one in facts:
        for name, value in one.items():
            if name not in joined:
                joined[name] = value
            elif name in _SUMMED:
                joined[name] += value
            elif name.endswith("_max"):
                joined[name] = max(joined[name], value)
    return joined
