"""Steps that call their ranks several times, or ranks of other duties: who is named, and for what."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from resources.telemetry.attribution import IterationTimes, attribute
from resources.telemetry.causes import Candidate, Cause
from resources.telemetry.detectors import find_candidates
from resources.telemetry.probes import GraderLatency
from resources.telemetry.span_lines import decode, encode
from resources.telemetry.spans import IterationSpan, RankSpan, TaskSpan
from resources.telemetry.task_ranks import engine_calls, own_ranks, stages
from resources.telemetry.timeline import Kind, Timeline, build_timeline
from resources.telemetry.timeline_image import timeline_svg
from resources.telemetry.verdict import Verdict, judge, judge_run
from tests.resources.telemetry.scenarios import grader_facts, iteration

Made = tuple[list[TaskSpan], IterationSpan]
Ranks = Callable[[float, float], Sequence[RankSpan]]


def attributed(made: Made) -> tuple[Timeline, IterationTimes]:
    tasks, span = made
    return attribute(tasks, start=span.started, end=span.ended)


def verdict_of(made: Made) -> Verdict:
    return judge(attributed(made)[0])


def found_in(made: Made) -> dict[Cause, Candidate]:
    return {candidate.cause: candidate for candidate in find_candidates(attributed(made)[0])}


def calls(*each: tuple[float, str], **facts: Any) -> Ranks:
    """Calls one after the other: (seconds, duty) of each, all by rank 0."""

    def made(begin: float, end: float) -> list[RankSpan]:
        spans, now = [], begin
        for seconds, duty in each:
            spans.append(RankSpan(rank=0, node="n0", start=now, end=now + seconds, duty=duty, facts=facts))
            now += seconds
        return spans

    return made


def with_task(made: Made, name: str, role: str, *ranks: RankSpan) -> Made:
    """The iteration with one more task behind its last; ranks count from there."""
    tasks, span = made
    begin = tasks[-1].ended
    placed = tuple(replace(rank, start=begin + rank.start, end=begin + rank.end) for rank in ranks)
    ended = max(rank.end for rank in placed)
    more = TaskSpan(
        iteration=span.iteration, task=name, role=role, pool=role, submitted=begin, started=begin, ended=ended,
        upstream=(tasks[-1].task,), ranks=placed,
    )  # fmt: skip
    return [*tasks, more], replace(span, ended=ended)


# --- a reward model, asked before the graders -----------------------------------------------------------------------

WITH_MODEL = {"rollout": 10.0, "reference": 1.0, "actor-update": 2.9, "critic-update": 1.0, "weight-sync": 0.1}


def model_facts(seconds: float) -> dict[str, Any]:
    model, rule = GraderLatency("rm", "model", 1), GraderLatency("exact", "rule", 2)
    model.add(seconds)
    for _ in range(16):
        rule.add(0.001)
    return {"graders": [rule.facts(), model.facts()]}


def test_a_reward_model_that_scores_before_the_graders_is_the_slow_reward_model():
    verdict = verdict_of(
        iteration(
            seconds=WITH_MODEL,
            ranks={"reward": calls((6.0, "reward_model.rm"), (0.05, ""))},
            facts={"reward": model_facts(6.0)},
        )
    )
    assert (verdict.role, verdict.cause) == ("reward", Cause.SLOW_REWARD_MODEL)
    assert verdict.gain_seconds == pytest.approx(6.05 - 1.0)  # the reference takes a second anyway
    assert "rm, model: 1 calls, median 6.000 s" in verdict.evidence_text


# --- grading inside a rollout ---------------------------------------------------------------------------------------


def judged_rollout() -> Made:
    """Dynamic sampling, one round: 10 s of sampling and 20 s of a judge in one step; the reward step has no work."""
    return iteration(
        seconds={"reward": 0.0},
        ranks={"rollout": calls((10.0, ""), (20.0, "reward"))},
        facts={"rollout": grader_facts([20.0] * 4, "judge", workers=4)},
    )


def test_a_judge_that_a_rollout_waits_for_is_the_slow_judge():
    verdict = verdict_of(judged_rollout())
    assert (verdict.role, verdict.cause) == ("reward", Cause.SLOW_JUDGE)
    assert verdict.gain_seconds == pytest.approx(20.0)
    assert verdict.evidence["exposed_seconds"] == pytest.approx(20.0)


def test_the_grading_inside_a_rollout_is_the_rewards_work_and_the_rollout_waits_for_it():
    made = judged_rollout()
    timeline, times = attributed(made)
    roles = {role.role: role for role in times.roles}
    assert roles["rollout"].busy == pytest.approx(10.0)
    assert roles["rollout"].waiting["reward"] == pytest.approx(20.0)
    assert roles["reward"].busy == pytest.approx(20.0)
    assert times.path_seconds()["reward", Kind.EXECUTE] == pytest.approx(20.0)
    for role in times.roles:
        assert role.total == pytest.approx(times.step_seconds)
    assert sum(segment.seconds for segment in times.path) == pytest.approx(times.step_seconds)
    assert b"rollout: execute 20.000 s" in timeline_svg(timeline)  # in the reward's row


def test_grading_ahead_in_another_iteration_keeps_the_reward_busy_and_not_the_engines():
    tasks, span = iteration(0)
    ahead = replace(
        judged_rollout()[0][0],
        iteration=1,
        started=0.0,
        ended=4.0,
        ranks=(RankSpan(rank=0, start=0.0, end=1.0), RankSpan(rank=0, start=1.0, end=4.0, duty="reward")),
    )
    _, times = attribute(tasks, start=span.started, end=span.ended, others=[ahead])
    busy = {role.role: role.busy for role in times.roles}
    assert busy["rollout"] == pytest.approx(3.01)  # its own from 0.01 s on, and what was ahead from 0 on
    assert busy["reward"] == pytest.approx(3.0)  # its own tenth from 3.02 s on lies within


def test_seconds_that_are_no_grading_do_not_stand_behind_the_rollout():
    """The samples that are written for the UI are a task of the reward role, and nobody waits for its scores."""
    made = iteration(seconds={"reward": 4.0}, facts={"reward": grader_facts([0.25] * 16)})
    made = with_task(made, "samples", "reward", RankSpan(rank=0, start=0.0, end=2.0))
    assert found_in(made)[Cause.SLOW_GRADER].evidence["exposed_seconds"] == pytest.approx(4.0)


# --- several calls of a rank ----------------------------------------------------------------------------------------


def test_a_refill_of_the_only_engine_is_no_slow_rank():
    refilled = iteration(ranks={"rollout": calls((10.0, ""), (0.1, "reward"), (5.0, ""), (0.1, "reward"))})
    assert Cause.SLOW_RANK not in found_in(refilled)
    _, times = attributed(refilled)
    rollout = next(task for task in times.tasks if task.task == "rollout")
    assert (rollout.num_ranks, rollout.skew) == (1, 1.0)


def test_an_engine_that_is_slow_in_every_round_is_named_for_all_of_them():
    def rounds(begin: float, end: float) -> list[RankSpan]:
        spans = []
        for start, fast, slow in ((begin, 4.0, 8.0), (begin + 8.2, 2.0, 4.0)):
            spans += [
                RankSpan(rank=0, node="n0", start=start, end=start + fast, facts={"rows": 16}),
                RankSpan(rank=1, node="n1", start=start, end=start + slow, facts={"rows": 16}),
                RankSpan(rank=0, start=start + slow, end=start + slow + 0.2, duty="reward"),
            ]
        return spans

    verdict = verdict_of(iteration(ranks={"rollout": rounds}))
    assert (verdict.role, verdict.cause, verdict.evidence["rank"]) == ("rollout", Cause.SLOW_RANK, 1.0)
    assert verdict.evidence["slowest_seconds"] == pytest.approx(12.0)
    assert verdict.gain_seconds == pytest.approx(6.0)


def gauged(start: float, seconds: float, slots: int) -> RankSpan:
    facts = {"slots": slots, "running": [[0.0, slots], [seconds, 0]], "rows": slots, "long_tail_seconds": 0.0}
    return RankSpan(rank=0, start=start, end=start + seconds, facts=facts)


def test_a_greedy_baseline_beside_a_larger_call_is_no_long_tail():
    """ReMax: 32 responses for 10 s, then eight greedy ones for 6 s, which are a fifth of 40 slots."""
    remax = iteration(ranks={"rollout": lambda begin, _: [gauged(begin, 10.0, 32), gauged(begin + 10.0, 6.0, 8)]})
    assert Cause.LONG_TAIL not in found_in(remax)


def test_the_tail_of_a_refill_is_told_in_its_own_slots():
    def rounds(begin: float, end: float) -> list[RankSpan]:
        tail = RankSpan(rank=0, start=begin + 2.0, end=begin + 10.0, facts={"slots": 8, "long_tail_seconds": 6.0})
        return [gauged(begin, 2.0, 32), tail]

    verdict = verdict_of(iteration(ranks={"rollout": rounds}))
    assert (verdict.cause, verdict.gain_seconds) == (Cause.LONG_TAIL, pytest.approx(6.0))


def test_the_tail_of_a_tensor_parallel_engine_is_told_although_its_peers_tell_nothing():
    def engine(begin: float, end: float) -> list[RankSpan]:
        facts = {"slots": 16, "running": [[0.0, 16], [2.0, 1], [8.0, 0]], "long_tail_seconds": 6.0}
        return [
            RankSpan(rank=0, start=begin, end=begin + 8.0, facts=facts),
            RankSpan(rank=1, start=begin, end=begin + 8.001),
        ]

    assert verdict_of(iteration(ranks={"rollout": engine})).cause is Cause.LONG_TAIL


def test_a_peer_that_tells_nothing_of_its_collectives_is_no_slow_rank():
    def reference(begin: float, end: float) -> list[RankSpan]:
        told = RankSpan(rank=0, start=begin, end=begin + 4.0, communication_seconds=2.5, facts={"tokens": 100})
        return [told, RankSpan(rank=1, start=begin, end=begin + 4.0)]

    found = found_in(iteration(ranks={"reference": reference}))
    assert Cause.SLOW_RANK not in found
    assert found[Cause.COMMUNICATION].evidence["communication_seconds"] == pytest.approx(2.5)


def test_what_a_later_call_waited_for_its_worker_is_no_queue_before_the_step():
    """The score call waits 3 s behind another role, after the reward model has worked for 6 s."""

    def scored(begin: float, end: float) -> list[RankSpan]:
        return [
            RankSpan(rank=0, start=begin, end=begin + 6.0, duty="reward_model.rm", queue_seconds=0.5),
            RankSpan(rank=0, start=begin + 9.0, end=begin + 9.1, queue_seconds=3.0),
        ]

    timeline, _ = attributed(iteration(gap=5.0, ranks={"reward": scored}))
    assert timeline.tasks["reward"].seconds(Kind.QUEUE) == pytest.approx(0.5)


# --- validation and checkpoints -------------------------------------------------------------------------------------


def test_a_validation_that_samples_and_scores_has_no_slow_rank():
    made = with_task(
        iteration(), "validation", "rollout",
        RankSpan(rank=0, start=0.0, end=10.0), RankSpan(rank=0, start=10.0, end=10.2, duty="reward"),
        RankSpan(rank=0, start=10.2, end=22.0), RankSpan(rank=0, start=22.0, end=22.2, duty="reward"),
    )  # fmt: skip
    found = found_in(made)
    assert Cause.SLOW_RANK not in found
    assert Cause.UNEVEN_TOKENS not in found
    assert (found[Cause.HANGING_TASK].role, found[Cause.HANGING_TASK].gain_seconds) == (
        "rollout", pytest.approx(22.2),
    )  # fmt: skip


def test_roles_that_save_side_by_side_are_not_compared_with_each_other():
    made = with_task(
        iteration(), "checkpoint", "actor",
        RankSpan(rank=0, start=0.0, end=6.0), RankSpan(rank=0, start=0.0, end=0.5, duty="critic"),
        RankSpan(rank=1, start=0.0, end=6.0), RankSpan(rank=1, start=0.0, end=0.5, duty="critic"),
    )  # fmt: skip
    assert Cause.SLOW_RANK not in found_in(made)


def test_a_slow_rank_whose_neighbours_last_as_long_gains_only_what_they_leave():
    """Two teachers at once: rank 1 of the first takes 3 s where the other takes 1, and the second teacher 2.5."""
    made = with_task(
        iteration(), "teacher", "teacher",
        RankSpan(rank=0, start=0.0, end=1.0, duty="teacher.a"), RankSpan(rank=1, start=0.0, end=3.0, duty="teacher.a"),
        RankSpan(rank=2, start=0.0, end=2.5, duty="teacher.b"), RankSpan(rank=3, start=0.0, end=2.5, duty="teacher.b"),
    )  # fmt: skip
    slow = found_in(made)[Cause.SLOW_RANK]
    assert (slow.role, slow.gain_seconds) == ("teacher", pytest.approx(0.5))


# --- a run whose actor has no log-probs task ------------------------------------------------------------------------


def grpo(reference: float, *, forward: float, **facts: Any) -> Made:
    """One optimizer step: rollout 3 s, reference, update 1.8 s, sync 0.3 s; no critic and no log-probs task."""

    def update(begin: float, end: float) -> list[RankSpan]:
        return [RankSpan(rank=0, start=begin, end=end, forward_seconds=forward, facts=facts)]

    tasks, span = iteration(seconds={"reference": reference}, ranks={"actor-update": update})
    return [task for task in tasks if task.role != "critic" and task.task != "actor-log-probs"], span


@pytest.mark.parametrize(("forward", "passes"), [(0.6, 1.0), (1.2, 2.0)])
def test_a_slow_reference_is_named_where_the_actor_scores_nothing_before_its_update(forward: float, passes: float):
    verdict = verdict_of(grpo(4.0, forward=forward, passes=passes))
    assert (verdict.role, verdict.cause) == ("reference", Cause.SLOW_REFERENCE)
    assert verdict.gain_seconds == pytest.approx(4.0 - 0.6)
    assert "reference took 4.00 s, 6.7 times the actor's forward pass (0.60 s)" in verdict.evidence_text


def test_a_reference_as_fast_as_the_updates_own_forward_pass_is_not_named():
    assert Cause.SLOW_REFERENCE not in found_in(grpo(0.8, forward=0.6, passes=1.0))
    assert Cause.SLOW_REFERENCE not in found_in(grpo(4.0, forward=0.0))  # nothing to compare with


# --- one cause, several roles ---------------------------------------------------------------------------------------


def step_wide(cause: Cause, roles: Sequence[str], gains: Sequence[float]) -> Verdict:
    each = [[Candidate(role=role, cause=cause, gain_seconds=gain)] for role, gain in zip(roles, gains, strict=True)]
    return judge_run(each, 10.0 * len(each))


@pytest.mark.parametrize(
    ("cause", "roles"), [(Cause.FETCH, ("actor", "critic")), (Cause.HANGING_TASK, ("actor", "rollout"))]
)
def test_a_cause_of_all_tasks_is_one_over_the_run_whichever_role_it_is_told_of(cause: Cause, roles: tuple[str, str]):
    """A fifth of each of four steps, told of two roles in turn: a tenth of the run for either would be balanced."""
    verdict = step_wide(cause, roles * 2, (2.0, 2.1, 1.9, 2.0))
    assert (verdict.role, verdict.cause) == (roles[1], cause)
    assert verdict.gain_fraction == pytest.approx(0.2)


def test_a_checkpoint_beside_a_longer_validation_is_told_of_the_validation():
    made = with_task(iteration(), "checkpoint", "actor", RankSpan(rank=0, start=0.0, end=1.0))
    made = with_task(made, "validation", "rollout", RankSpan(rank=0, start=0.0, end=6.0))
    hanging = found_in(made)[Cause.HANGING_TASK]
    assert (hanging.role, hanging.evidence["task"]) == ("rollout", "validation")


# --- the ranks themselves -------------------------------------------------------------------------------------------


def test_calls_of_a_rank_add_up_and_maxima_are_compared():
    facts: list[dict[str, Any]] = [{"tokens": 4, "kv_cache_use_max": 0.9}, {"tokens": 2, "kv_cache_use_max": 0.4}]
    first = RankSpan(rank=0, start=1.0, end=3.0, communication_seconds=0.5, facts=facts[0])
    second = RankSpan(rank=0, start=7.0, end=8.0, facts={**facts[1], "slots": 2})
    span = TaskSpan(iteration=0, task="rollout", role="rollout", started=1.0, ended=8.0, ranks=(first, second))
    [rank] = own_ranks(span)
    assert (rank.work_seconds, rank.communication_seconds) == (2.5, 0.5)
    assert rank.facts == {"tokens": 6, "kv_cache_use_max": 0.9, "slots": 2}
    assert engine_calls(span) == [[first], [second]]


def test_duties_side_by_side_are_one_stage_and_what_follows_is_the_next():
    spans = [
        RankSpan(rank=0, start=0.0, end=2.0, duty="teacher.a"), RankSpan(rank=0, start=1.0, end=3.0, duty="teacher.b"),
        RankSpan(rank=0, start=3.0, end=4.0, duty="reward"),
    ]  # fmt: skip
    span = TaskSpan(iteration=0, task="teacher", role="teacher", started=0.0, ended=4.0, ranks=tuple(spans))
    assert stages(span) == [[[spans[0]], [spans[1]]], [[spans[2]]]]


def test_a_rank_of_another_duty_survives_the_file_and_an_own_one_says_nothing():
    span = TaskSpan(
        iteration=0, task="rollout", role="rollout", started=0.0, ended=3.0,
        ranks=(RankSpan(rank=0, start=0.0, end=2.0), RankSpan(rank=0, start=2.0, end=3.0, duty="reward")),
    )  # fmt: skip
    assert decode(encode(span)) == span
    assert encode(span).count("duty") == 1
    assert build_timeline([span]).tasks["rollout"].execute_seconds_of("reward") == pytest.approx(1.0)
