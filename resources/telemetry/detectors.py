"""Looks for each cause in one iteration's spans, with evidence and what it costs.

Pure. A cause's cost is how much shorter the step would have been without its excess (`replay_seconds`), so a wait that
another role would have caused anyway costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resources.telemetry.attribution import critical_path
from resources.telemetry.causes import DEFAULT_THRESHOLDS, Candidate, Cause, Thresholds, is_rare
from resources.telemetry.rollout_gauge import group_long_tail_seconds
from resources.telemetry.spans import CONTROLLER, RankSpan
from resources.telemetry.task_ranks import (
    GRADING_TASK,
    VALIDATION,
    count_ranks,
    engine_calls,
    held_alone_seconds,
    is_rollout,
    own_ranks,
    ranks_by_duty,
    role_of_duty,
)
from resources.telemetry.timeline import Kind, Reductions, TaskTimeline, Timeline, replay_seconds

_CAUSE_OF_GRADER_KIND = {
    "model": Cause.SLOW_REWARD_MODEL,
    "judge": Cause.SLOW_JUDGE,
    "http": Cause.SLOW_JUDGE,
    "sandbox": Cause.SLOW_SANDBOX,
}


@dataclass(frozen=True, slots=True)
class _Found:
    role: str
    cause: Cause
    reductions: Reductions
    evidence: Mapping[str, float | str]
    gap_reduction: float = 0.0
    freed: tuple[str, ...] = ()


Detector = Callable[[Timeline, Thresholds], list[_Found]]


def find_candidates(timeline: Timeline, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> list[Candidate]:
    """All causes that would have shortened this step, the dearest first."""
    found = [hit for detect in _DETECTORS for hit in detect(timeline, thresholds)]
    candidates = [
        Candidate(
            role=hit.role,
            cause=hit.cause,
            gain_seconds=timeline.step_seconds
            - replay_seconds(timeline, hit.reductions, gap_reduction=hit.gap_reduction, freed=hit.freed),
            evidence=hit.evidence,
        )
        for hit in found
    ]
    return sorted((c for c in candidates if c.gain_seconds > 0), key=lambda c: -c.gain_seconds)


def _of_role(timeline: Timeline, role: str, word: str = "") -> list[TaskTimeline]:
    return [task for task in timeline.tasks.values() if task.role == role and word in task.span.task.replace("_", "-")]


def _typical_seconds(task: TaskTimeline) -> float:
    """Own work of the lower-median rank, so that one slow rank does not make a whole pool look slow."""
    work = sorted(rank.work_seconds for rank in own_ranks(task.span))
    return work[(len(work) - 1) // 2] if work else task.seconds(Kind.EXECUTE)


def _grader(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    """The reward task's span is what is left after the rollout: all of it is exposed, so all of it is excess.

    So is what a rollout waited for, which cannot go on without its scores. Other tasks of the role grade nothing.
    """
    tasks = [task for task in timeline.tasks.values() if task.span.task == GRADING_TASK or task.span.graders]
    excess = {(task.key, Kind.EXECUTE): task.execute_seconds_of("reward") for task in tasks}
    exposed = sum(excess.values())
    if exposed <= 0:
        return []
    graders = [grader for task in tasks for grader in task.span.graders]
    evidence: dict[str, float | str] = {"exposed_seconds": exposed}
    hidden = sum(float(task.span.facts.get("hidden_seconds", 0.0)) for task in tasks)
    if hidden:
        evidence["hidden_seconds"] = hidden
    cause = Cause.SLOW_GRADER
    if graders:
        worst = max(graders, key=lambda g: g["total_seconds"] / max(1, g.get("workers", 1)))
        evidence |= {
            key: worst[key]
            for key in ("name", "kind", "calls", "slow_calls", "p50_seconds", "p95_seconds", "max_seconds", "timeouts")
            if key in worst
        }
        cause = _CAUSE_OF_GRADER_KIND.get(str(worst.get("kind")), Cause.SLOW_GRADER)
        if is_rare(evidence, thresholds):
            cause = Cause.RARE_SLOW_GRADER
    return [_Found("reward", cause, excess, evidence)]


def _long_tail(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    found = []
    for task in timeline.tasks.values():
        seconds = long_tail_seconds(task) if is_rollout(task.span) else 0.0
        if seconds <= 0:
            continue
        facts = _merged_lengths(task)
        evidence: dict[str, float | str] = {
            "tail_seconds": seconds,
            "tail_fraction": seconds / max(1e-9, task.execute_seconds_of("rollout")),
            "engines": float(len(own_ranks(task.span))),
            **facts,
        }
        found.append(_Found("rollout", Cause.LONG_TAIL, {(task.key, Kind.EXECUTE): seconds}, evidence))
    return found


def long_tail_seconds(task: TaskTimeline) -> float:
    """The task's own figure, or that of its engines' calls, each with slots of its own: a refill or a greedy baseline
    has fewer than the call before it, and is no tail of that one."""
    if "long_tail_seconds" in task.span.facts:
        return float(task.span.facts["long_tail_seconds"])
    return sum(_tail_of_call(engines) for engines in engine_calls(task.span))


def _tail_of_call(engines: Sequence[RankSpan]) -> float:
    """The engines' series taken together, or the last engine's own figure."""
    gauged = [engine for engine in engines if "running" in engine.facts and "slots" in engine.facts]
    if len(gauged) > 1 and len(gauged) == len(engines):
        return group_long_tail_seconds([(one.start, one.facts["slots"], one.facts["running"]) for one in gauged])
    return float(max(engines, key=lambda engine: engine.end).facts.get("long_tail_seconds", 0.0))


def _merged_lengths(task: TaskTimeline) -> dict[str, float | str]:
    sources = (
        [task.span.facts]
        if "response_length_max" in task.span.facts
        else [engine.facts for engines in engine_calls(task.span) for engine in engines]
    )
    known = [facts for facts in sources if {"response_length_max", "response_length_p50"} <= facts.keys()]
    if not known:
        return {}
    rows = sum(facts.get("rows", 1) for facts in known)
    return {
        "longest_response": float(max(facts["response_length_max"] for facts in known)),
        "typical_response": sum(facts["response_length_p50"] * facts.get("rows", 1) for facts in known) / max(1, rows),
    }


def _kv_cache(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    found = []
    for task in _of_role(timeline, "rollout"):
        ranks = [
            r
            for r in own_ranks(task.span)
            if r.facts.get("preemptions", 0) or r.facts.get("kv_cache_use_max", 0.0) >= thresholds.kv_cache_full
        ]
        if not ranks:
            continue
        lost = max(float(rank.facts.get("starved_seconds", 0.0)) for rank in ranks)
        evidence: dict[str, float | str] = {
            "preemptions": float(sum(rank.facts.get("preemptions", 0) for rank in ranks)),
            "kv_cache_use_max": max(float(rank.facts.get("kv_cache_use_max", 1.0)) for rank in ranks),
            "starved_seconds": lost,
            "slots": float(sum(rank.facts.get("slots", 0) for rank in ranks)),
        }
        found.append(_Found("rollout", Cause.KV_CACHE, {(task.key, Kind.EXECUTE): lost}, evidence))
    return found


def _skew(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    """Per role: how much its slowest rank's own work exceeds the lower-median one's, over all its tasks.

    A validation is left out: its own cause is worth all of it.
    """
    reductions: dict[str, dict[tuple[str, Kind], float]] = {}
    worst: dict[str, tuple[float, RankSpan, float, float]] = {}
    for task, duty, ranks in _duties(timeline):
        by_work = sorted(ranks, key=lambda rank: rank.work_seconds)
        median, slowest = by_work[(len(ranks) - 1) // 2], by_work[-1]
        excess = slowest.work_seconds - median.work_seconds
        if duty == "rollout":
            excess -= long_tail_seconds(task)
        if median.work_seconds <= 0 or slowest.work_seconds < thresholds.skew * median.work_seconds:
            continue
        if any(rank.duty for rank in task.span.ranks):
            excess = min(excess, held_alone_seconds(task.span, duty))
        if excess <= 0:
            continue
        role = role_of_duty(duty)
        held = reductions.setdefault(role, {})
        held[task.key, Kind.EXECUTE] = max(excess, held.get((task.key, Kind.EXECUTE), 0.0))
        tokens = (float(slowest.facts.get("tokens", 0)), float(median.facts.get("tokens", 0)))
        expected = median.work_seconds * (tokens[0] / tokens[1] - 1.0) if min(tokens) > 0 else 0.0
        if excess > worst.get(role, (0.0,))[0]:
            worst[role] = (excess, slowest, median.work_seconds, expected)
    found = []
    for role, (excess, slowest, median_seconds, expected) in worst.items():
        cause = Cause.UNEVEN_TOKENS if expected >= thresholds.tokens_explain * excess else Cause.SLOW_RANK
        evidence: dict[str, float | str] = {
            "rank": float(slowest.rank),
            "node": slowest.node,
            "slowest_seconds": slowest.work_seconds,
            "median_seconds": median_seconds,
        }
        found.append(_Found(role, cause, reductions[role], evidence))
    return found


def _duties(timeline: Timeline) -> Iterator[tuple[TaskTimeline, str, Sequence[RankSpan]]]:
    """(task, duty, its ranks) wherever several ranks shared one duty's work. Graders' calls differ by themselves."""
    for task in timeline.tasks.values():
        if task.span.task == VALIDATION:
            continue
        for duty, ranks in ranks_by_duty(task.span).items():
            if len(ranks) > 1 and role_of_duty(duty) != "reward":
                yield task, duty, ranks


def _against_actor(
    timeline: Timeline, thresholds: Thresholds, role: str, cause: Cause, pairs: Sequence[tuple[str, str]]
) -> list[_Found]:
    """Tasks of `role` against the actor's counterpart: the excess over it."""
    reductions: dict[tuple[str, Kind], float] = {}
    own = counterpart = 0.0
    against = ""
    for word, actor_word in pairs:
        against, baseline = _counterpart(timeline, actor_word)
        for task in _of_role(timeline, role, word) if baseline > 0 else ():
            own += _typical_seconds(task)
            counterpart += baseline
            reductions[task.key, Kind.EXECUTE] = max(0.0, _typical_seconds(task) - baseline)
    if counterpart <= 0 or own < thresholds.heavier * counterpart:
        return []
    evidence: dict[str, float | str] = {
        "seconds": own, "actor_seconds": counterpart, "ratio": own / counterpart, "against": against,
    }  # fmt: skip
    return [_Found(role, cause, reductions, evidence)]


def _counterpart(timeline: Timeline, word: str) -> tuple[str, float]:
    """(what it is, its seconds) of the actor's work to compare with; 0 where there is none.

    A run with one optimizer step has no log-probs task: its update's forward passes over the rows are the same work.
    An update that doesn't tell how often it went over them is taken at all its passes, so that nobody looks too slow.
    """
    theirs = _of_role(timeline, "actor", word)
    if theirs:
        return word.replace("log-prob", "log-probs"), _typical_seconds(theirs[0])
    if word != "log-prob":
        return "", 0.0
    passes = sorted(
        rank.forward_seconds / max(1.0, float(rank.facts.get("passes", 1.0)))
        for task in _of_role(timeline, "actor", "update")
        for rank in own_ranks(task.span)
    )
    return "forward pass", passes[(len(passes) - 1) // 2] if passes else 0.0


def _critic(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    return _against_actor(
        timeline, thresholds, "critic", Cause.HEAVY_CRITIC, (("update", "update"), ("value", "log-prob"))
    )


def _reference(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    return _against_actor(timeline, thresholds, "reference", Cause.SLOW_REFERENCE, (("", "log-prob"),))


def _controller(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    tasks = timeline.tasks.values()
    serialise = {(t.key, Kind.SERIALIZE): t.seconds(Kind.SERIALIZE) for t in tasks}
    collect = {(t.key, Kind.COLLECT): t.seconds(Kind.COLLECT) for t in tasks}
    scheduling = {(t.key, Kind.SCHEDULING): t.seconds(Kind.SCHEDULING) for t in tasks}
    last = timeline.last
    tail = timeline.end - last.ended if last is not None else 0.0
    first = min((t.span.submitted for t in tasks if t.span.submitted is not None), default=timeline.start)
    return [
        _Found(
            CONTROLLER,
            Cause.SERIALISE,
            serialise,
            {"serialise_seconds": sum(serialise.values()), "bytes": float(sum(t.span.dispatch.bytes for t in tasks))},
        ),
        _Found(
            CONTROLLER,
            Cause.COLLECT,
            collect,
            {"collect_seconds": sum(collect.values()), "bytes": float(sum(t.span.collect.bytes for t in tasks))},
        ),
        _Found(
            CONTROLLER,
            Cause.SCHEDULING,
            scheduling,
            {
                "scheduling_seconds": sum(scheduling.values()) + tail,
                "between_seconds": max(0.0, first - timeline.start),
                "tasks": float(len(tasks)),
            },
            gap_reduction=1.0,
        ),
    ]


def _fetch(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    reductions = {(task.key, Kind.FETCH): task.seconds(Kind.FETCH) for task in timeline.tasks.values()}
    if not any(reductions.values()):
        return []
    slowest = max(timeline.tasks.values(), key=lambda task: task.seconds(Kind.FETCH))
    return [
        _Found(slowest.role, Cause.FETCH, reductions, {"fetch_seconds": sum(reductions.values()), "task": slowest.key})
    ]


def _communication(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    """Only what even the rank that waits least spends in collectives: more than that is skew, not communication."""
    found = []
    for role in ("actor", "critic", "reference"):
        tasks = [task for task in _of_role(timeline, role) if count_ranks(task.span) > 1]
        least = {
            (task.key, Kind.EXECUTE): min((rank.communication_seconds for rank in own_ranks(task.span)), default=0.0)
            for task in tasks
        }
        execute = sum(task.seconds(Kind.EXECUTE) for task in tasks)
        if execute > 0 and sum(least.values()) >= thresholds.communication_share * execute:
            evidence = {"communication_seconds": sum(least.values()), "execute_seconds": execute}
            found.append(_Found(role, Cause.COMMUNICATION, least, evidence))
    return found


def _whole_tasks(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    found = []
    for words, cause in ((("weight",), Cause.WEIGHT_SYNC), (("checkpoint", VALIDATION), Cause.HANGING_TASK)):
        tasks = [task for task in timeline.tasks.values() if any(word in task.span.task for word in words)]
        seconds = sum(task.seconds(Kind.EXECUTE) for task in tasks)
        if seconds <= 0:
            continue
        longest = max(tasks, key=lambda task: task.seconds(Kind.EXECUTE))
        evidence: dict[str, float | str] = {
            "seconds": seconds,
            "bytes": float(sum(task.span.facts.get("bytes", 0) for task in tasks)),
            "task": longest.key,
        }
        excess = {(task.key, Kind.EXECUTE): task.seconds(Kind.EXECUTE) for task in tasks}
        found.append(_Found(longest.role, cause, excess, evidence))
    return found


def _queued(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    """Roles that need no accelerator and queue behind one that does."""
    found = []
    for task in timeline.tasks.values():
        if task.role not in ("reward", "advantage") or not any(edge.is_pool for edge in task.edges):
            continue
        holder = timeline.tasks[next(edge.task for edge in task.edges if edge.is_pool)]
        upstream_end = max((timeline.tasks[e.task].ended for e in task.edges if not e.is_pool), default=timeline.start)
        queued = max(0.0, min(task.execute_start, holder.execute_end) - upstream_end)
        evidence: dict[str, float | str] = {"queued_seconds": queued, "behind": holder.role, "pool": task.span.pool}
        found.append(_Found(task.role, Cause.SHARED_POOL, {}, evidence, freed=(task.key,)))
    return found


def _compute(timeline: Timeline, thresholds: Thresholds) -> list[_Found]:
    """Every role, as if its pool had twice the ranks: half its execution."""
    path = critical_path(timeline)
    found = []
    for role in dict.fromkeys(task.role for task in timeline.tasks.values()):
        share = sum(s.seconds for s in path if s.role == role and s.kind is Kind.EXECUTE) / max(
            1e-12, timeline.step_seconds
        )
        halved = {(task.key, Kind.EXECUTE): task.execute_seconds_of(role) / 2 for task in timeline.tasks.values()}
        found.append(
            _Found(
                role, Cause.COMPUTE_BOUND, halved, {"path_share": share, "pool": _of_role(timeline, role)[0].span.pool}
            )
        )
    return found


_DETECTORS: tuple[Detector, ...] = (
    _grader,
    _long_tail,
    _kv_cache,
    _skew,
    _critic,
    _reference,
    _controller,
    _fetch,
    _communication,
    _whole_tasks,
    _queued,
    _compute,
)
