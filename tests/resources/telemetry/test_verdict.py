"""Each planted bottleneck gets its role and cause; what only looks like one does not."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.telemetry.attribution import attribute
from resources.telemetry.causes import Cause
from resources.telemetry.detectors import find_candidates
from resources.telemetry.spans import Dispatch, IterationSpan, RankSpan, TaskSpan, Waits
from resources.telemetry.timeline import Kind, replay_seconds
from resources.telemetry.verdict import Verdict, judge, judge_run
from tests.resources.telemetry.scenarios import grader_facts, iteration


def verdict_of(made: tuple[list[TaskSpan], IterationSpan]) -> Verdict:
    tasks, span = made
    timeline, _ = attribute(tasks, start=span.started, end=span.ended)
    return judge(timeline)


def ranks_with_work(*work: float, tokens: tuple[int, ...] = (), collective: bool = True) -> Any:
    """Ranks that end together, as collectives make them: what is not work is waiting in a collective."""

    def made(begin: float, end: float) -> list[RankSpan]:
        last = begin + max(work)
        return [
            RankSpan(
                rank=index, node=f"n{index}", start=begin, end=last if collective else begin + seconds,
                communication_seconds=last - begin - seconds if collective else 0.0,
                facts={"tokens": tokens[index]} if tokens else {},
            )
            for index, seconds in enumerate(work)
        ]  # fmt: skip

    return made


def test_a_balanced_iteration_is_called_balanced():
    verdict = verdict_of(iteration())
    assert verdict.is_balanced
    assert verdict.line.startswith("balanced: no single change")


def test_a_grader_that_sleeps_is_the_reward_role():
    facts = grader_facts([0.25] * 16)
    verdict = verdict_of(iteration(seconds={"reward": 4.0}, facts={"reward": facts}))
    assert (verdict.role, verdict.cause) == ("reward", Cause.SLOW_GRADER)
    # reference, values and log-probs would have taken 0.5 s anyway
    assert verdict.gain_seconds == pytest.approx(3.5)
    assert "reward.processes" in verdict.change
    assert "16 calls, median 0.250 s" in verdict.evidence_text


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("model", Cause.SLOW_REWARD_MODEL),
        ("judge", Cause.SLOW_JUDGE),
        ("sandbox", Cause.SLOW_SANDBOX),
        ("python", Cause.SLOW_GRADER),
    ],
)
def test_a_slow_reward_is_named_by_its_kind(kind: str, cause: Cause):
    facts = grader_facts([0.25] * 16, kind)
    assert verdict_of(iteration(seconds={"reward": 4.0}, facts={"reward": facts})).cause is cause


def test_one_grader_call_in_fifty_that_sleeps_long_is_rare_calls():
    facts = grader_facts([0.01] * 49 + [4.0])
    verdict = verdict_of(iteration(seconds={"reward": 4.5}, facts={"reward": facts}))
    assert (verdict.role, verdict.cause) == ("reward", Cause.RARE_SLOW_GRADER)
    assert "1 of 50 calls were slow: up to 4.00 s" in verdict.evidence_text
    assert "timeout_seconds of grader math" in verdict.change


def test_rare_slow_calls_over_a_run_stay_rare_even_if_an_iteration_has_none():
    candidates, total = [], 0.0
    for number in range(8):
        slow = [4.0] if number % 2 else []
        made, span = iteration(
            number, seconds={"reward": 4.2 if slow else 0.2}, facts={"reward": grader_facts([0.01] * 20 + slow)}
        )
        timeline, _ = attribute(made, start=span.started, end=span.ended)
        candidates.append(find_candidates(timeline))
        total += timeline.step_seconds
    verdict = judge_run(candidates, total)
    assert (verdict.role, verdict.cause) == ("reward", Cause.RARE_SLOW_GRADER)
    assert verdict.gain_seconds == pytest.approx(3.7 / 2)


def test_one_very_long_response_is_the_long_tail():
    def engines(begin: float, end: float) -> list[RankSpan]:
        return [
            RankSpan(rank=0, start=begin, end=begin + 8.0, facts={
                "slots": 16, "running": [[0.0, 16], [2.0, 1], [8.0, 0]], "response_length_max": 400,
                "response_length_p50": 20.0, "rows": 16}),
            RankSpan(rank=1, start=begin, end=begin + 2.0, facts={
                "slots": 16, "running": [[0.0, 16], [2.0, 0]], "response_length_max": 40,
                "response_length_p50": 20.0, "rows": 16}),
        ]  # fmt: skip

    verdict = verdict_of(iteration(ranks={"rollout": engines}))
    assert (verdict.role, verdict.cause) == ("rollout", Cause.LONG_TAIL)
    assert verdict.gain_seconds == pytest.approx(6.0)
    assert "400 tokens, the typical one 20" in verdict.evidence_text
    assert "async_depth: 1" in verdict.change


def test_a_slow_actor_rank_is_named_although_collectives_make_all_ranks_end_together():
    verdict = verdict_of(iteration(ranks={"actor-update": ranks_with_work(1.8, 1.8, 5.4, 1.8)}))
    assert (verdict.role, verdict.cause) == ("actor", Cause.SLOW_RANK)
    assert verdict.evidence["rank"] == 2.0
    assert "rank 2 of roles.actor on node n2" in verdict.change


def test_a_rank_with_more_tokens_is_no_slow_rank():
    made = ranks_with_work(1.8, 5.4, tokens=(1000, 3000))
    assert verdict_of(iteration(ranks={"actor-update": made})).cause is Cause.UNEVEN_TOKENS


def test_a_critic_of_three_times_the_actor_is_the_heavy_critic():
    verdict = verdict_of(iteration(seconds={"critic-update": 5.4, "critic-values": 1.5}))
    assert (verdict.role, verdict.cause) == ("critic", Cause.HEAVY_CRITIC)
    assert "3.0 times the actor's" in verdict.evidence_text


def test_a_critic_that_hides_behind_the_rollout_of_a_slow_actor_is_not_charged():
    """The critic is twice as heavy in its scoring, but the grader takes as long anyway."""
    verdict = verdict_of(
        iteration(seconds={"critic-values": 3.0, "reward": 3.0}, facts={"reward": grader_facts([3.0])})
    )
    gains = {candidate.cause: candidate.gain_seconds for candidate in verdict.others}
    assert Cause.HEAVY_CRITIC not in gains
    assert Cause.SLOW_GRADER not in gains


def test_a_reference_on_a_slow_pool_is_named():
    verdict = verdict_of(iteration(seconds={"reference": 4.0}))
    assert (verdict.role, verdict.cause) == ("reference", Cause.SLOW_REFERENCE)
    assert verdict.gain_seconds == pytest.approx(3.5)
    assert "roles.reference.pool" in verdict.change


def test_a_reference_as_slow_as_the_actors_own_log_probs_is_not_a_slow_pool():
    verdict = verdict_of(iteration(seconds={"reference": 2.0, "actor-log-probs": 2.0, "critic-values": 2.0}))
    assert verdict.is_balanced


def test_a_driver_that_serialises_is_the_controller():
    verdict = verdict_of(
        iteration(
            serialize={
                "actor-log-probs": 1.0,
                "reference": 1.0,
                "critic-values": 1.0,
                "reward": 1.0,
                "actor-update": 1.5,
                "critic-update": 1.5,
            }
        )
    )
    assert (verdict.role, verdict.cause) == ("controller", Cause.SERIALISE)
    # four siblings serialise side by side: charged once; the two updates: the actor's is on the path
    assert verdict.gain_seconds == pytest.approx(2.5)
    assert "MiB" in verdict.evidence_text


def test_serialising_ahead_of_need_holds_up_nobody():
    """All tasks are submitted at once: the update is pickled by the controller while the rollout still decodes."""
    tasks, span = iteration()
    ahead = [
        replace(task, submitted=0.0, dispatch=Dispatch(serialize_seconds=2.0)) if task.task == "actor-update" else task
        for task in tasks
    ]
    assert verdict_of((ahead, span)).is_balanced


def test_serialising_by_the_controller_before_the_task_starts_is_charged():
    tasks, span = iteration(gap=2.0)
    late = [replace(task, dispatch=Dispatch(serialize_seconds=1.9, bytes=2**20)) for task in tasks]
    verdict = verdict_of((late, span))
    assert (verdict.role, verdict.cause) == ("controller", Cause.SERIALISE)


def test_a_driver_that_collects_is_the_controller():
    assert verdict_of(iteration(collect={"rollout": 3.0})).cause is Cause.COLLECT


def test_gaps_between_tasks_are_the_controllers_scheduling_wait():
    verdict = verdict_of(iteration(gap=0.6))
    assert (verdict.role, verdict.cause) == ("controller", Cause.SCHEDULING)
    assert verdict.gain_seconds == pytest.approx(6 * 0.6)


def test_preemptions_are_the_kv_cache():
    def engine(begin: float, end: float) -> list[RankSpan]:
        facts = {"preemptions": 12, "kv_cache_use_max": 1.0, "starved_seconds": 3.0, "slots": 64}
        return [RankSpan(rank=0, start=begin, end=end, facts=facts)]

    verdict = verdict_of(iteration(seconds={"rollout": 6.0}, ranks={"rollout": engine}))
    assert (verdict.role, verdict.cause) == ("rollout", Cause.KV_CACHE)
    assert "12 preemptions" in verdict.evidence_text
    assert "rollout.kv_cache_bytes" in verdict.change


def test_a_slow_weight_sync_is_named():
    verdict = verdict_of(iteration(seconds={"weight-sync": 3.0}, facts={"weight-sync": {"bytes": 2**30}}))
    assert (verdict.role, verdict.cause) == ("actor", Cause.WEIGHT_SYNC)
    assert "1.0 GiB" in verdict.evidence_text


def test_a_rollout_that_fills_the_step_without_a_tail_is_compute_bound():
    verdict = verdict_of(iteration(seconds={"rollout": 12.0}))
    assert (verdict.role, verdict.cause) == ("rollout", Cause.COMPUTE_BOUND)
    assert verdict.gain_seconds == pytest.approx(6.0)
    assert "roles.rollout.tensor_parallel" in verdict.change


def test_a_role_that_fills_the_step_beside_another_as_long_is_not_compute_bound():
    made = iteration(seconds={"reward": 19.8, "reference": 20.0}, facts={"reward": grader_facts([19.8])})
    assert verdict_of(made).is_balanced  # the reference computes for four fifths of the path, and would gain 0.2 s


def test_a_grader_hidden_by_a_slower_sibling_is_not_the_bottleneck():
    made = iteration(seconds={"reward": 3.9, "reference": 4.0}, facts={"reward": grader_facts([3.9])})
    verdict = verdict_of(made)
    assert verdict.is_balanced  # removing either alone saves 0.1 s or nothing


def test_a_reward_that_queues_behind_the_actor_on_its_pool_is_a_shared_pool():
    tasks, _ = iteration()
    by_name = {task.task: task for task in tasks}
    rollout_end = by_name["rollout"].ended
    shifted = []
    for task in tasks:
        pool = "main" if task.role in ("reward", "actor") else task.pool
        if task.task == "actor-log-probs":
            ranks = (RankSpan(rank=0, start=rollout_end + 0.01, end=rollout_end + 2.0),)
            shifted.append(
                TaskSpan(
                    iteration=0,
                    task=task.task,
                    role="actor",
                    pool=pool,
                    started=rollout_end + 0.01,
                    ended=rollout_end + 2.0,
                    upstream=task.upstream,
                    ranks=ranks,
                )
            )
        elif task.task == "reward":
            ranks = (RankSpan(rank=0, start=rollout_end + 2.0, end=rollout_end + 5.0, queue_seconds=1.99),)
            shifted.append(
                TaskSpan(
                    iteration=0,
                    task=task.task,
                    role="reward",
                    pool=pool,
                    started=rollout_end + 0.01,
                    ended=rollout_end + 5.0,
                    upstream=task.upstream,
                    ranks=ranks,
                    waits=Waits(queue=1.99),
                    facts=grader_facts([3.0]),
                )
            )
        elif task.task in ("advantage", "critic-update", "actor-update", "weight-sync"):
            later = rollout_end + 5.0 - by_name["advantage"].submitted
            ranks = tuple(RankSpan(rank=0, start=r.start + later, end=r.end + later) for r in task.ranks)
            shifted.append(
                TaskSpan(
                    iteration=0,
                    task=task.task,
                    role=task.role,
                    pool=pool,
                    started=task.started + later,
                    ended=task.ended + later,
                    upstream=task.upstream,
                    ranks=ranks,
                )
            )
        else:
            shifted.append(task)
    timeline, times = attribute(shifted)
    reward = next(role for role in times.roles if role.role == "reward")
    assert reward.waiting["actor"] == pytest.approx(1.99)
    found = {candidate.cause: candidate for candidate in find_candidates(timeline)}
    assert found[Cause.SHARED_POOL].gain_seconds == pytest.approx(2.0)
    assert found[Cause.SHARED_POOL].role == "reward"


def test_a_slow_rank_holds_up_the_role_that_begins_on_the_fast_rank_before_the_slow_one_is_through():
    actor = (
        RankSpan(rank=0, start=2.0, end=7.0, communication_seconds=4.0),
        RankSpan(rank=1, start=2.0, end=7.01),
    )
    critic = (
        RankSpan(rank=0, start=7.005, end=8.5, queue_seconds=5.005),
        RankSpan(rank=1, start=7.02, end=8.5, queue_seconds=5.02),
    )
    rollout = (RankSpan(rank=0, start=0.0, end=2.0),)
    tasks = [
        TaskSpan(iteration=0, task="rollout", role="rollout", pool="engines", started=0.0, ended=2.0, ranks=rollout),
        TaskSpan(
            iteration=0, task="actor-update", role="actor", pool="main", started=2.0, ended=7.01,
            upstream=("rollout",), ranks=actor,
        ),
        TaskSpan(
            iteration=0, task="critic-update", role="critic", pool="main", started=2.0, ended=8.5,
            upstream=("rollout",), ranks=critic,
        ),
    ]  # fmt: skip
    timeline, times = attribute(tasks, start=0.0, end=8.5)
    verdict = judge(timeline)
    assert (verdict.role, verdict.cause) == ("actor", Cause.SLOW_RANK)
    assert verdict.gain_seconds == pytest.approx(4.01)  # rank 1 worked 5.01 s, rank 0 one second
    assert sum(role.total for role in times.roles if role.role == "critic") == pytest.approx(8.5)


def test_unmeasured_evidence_reads_as_a_question_mark():
    verdict = verdict_of(iteration(seconds={"reward": 4.0}))
    assert verdict.cause is Cause.SLOW_GRADER
    assert "grader ?" in verdict.change


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_roles_parts_sum_to_the_step_and_replay_reproduces_it(data: st.DataObject):
    seconds = {
        name: data.draw(st.floats(0.0, 5.0), label=name)
        for name in (
            "rollout",
            "reward",
            "reference",
            "actor-log-probs",
            "critic-values",
            "advantage",
            "critic-update",
            "actor-update",
            "weight-sync",
        )
    }
    serialize = {name: data.draw(st.floats(0.0, 1.0)) for name in ("reward", "actor-update")}
    collect = {name: data.draw(st.floats(0.0, 1.0)) for name in ("rollout", "reference")}
    tasks, span = iteration(seconds=seconds, serialize=serialize, collect=collect, gap=data.draw(st.floats(0.0, 0.5)))
    timeline, times = attribute(tasks, start=span.started, end=span.ended)
    for role in times.roles:
        assert role.total == pytest.approx(times.step_seconds, abs=1e-6)
    assert sum(segment.seconds for segment in times.path) == pytest.approx(times.step_seconds, abs=1e-6)
    assert replay_seconds(timeline, {}) == pytest.approx(times.step_seconds, abs=1e-6)
    assert all(candidate.gain_seconds <= times.step_seconds + 1e-6 for candidate in find_candidates(timeline))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 3), st.floats(0, 1), st.sets(st.integers(0, 7), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_parts_sum_to_the_step_for_any_dag_even_with_overlaps(rows: list[tuple[float, float, float, set[int]]]):
    """Starts that ignore the upstream's end are what clocks without an offset give."""
    tasks = [
        TaskSpan(
            iteration=0, task=f"t{index}", role=f"r{index % 3}", pool="p", started=start, ended=start + queue + length,
            upstream=tuple(f"t{name}" for name in sorted(upstream) if name < index), waits=Waits(queue=queue),
            ranks=(RankSpan(rank=0, start=start + queue, end=start + queue + length, queue_seconds=queue),),
        )
        for index, (start, length, queue, upstream) in enumerate(rows)
    ]  # fmt: skip
    _, times = attribute(tasks)
    for role in times.roles:
        assert role.total == pytest.approx(times.step_seconds, abs=1e-6)
    assert sum(segment.seconds for segment in times.path) == pytest.approx(times.step_seconds, abs=1e-6)
    assert all(segment.seconds >= 0 for segment in times.path)


def test_time_in_a_neighbouring_iteration_counts_as_busy():
    tasks, span = iteration(1, start=100.0)
    ahead = TaskSpan(
        iteration=2, task="rollout", role="rollout", pool="rollout", started=span.ended - 2.0, ended=span.ended + 1.0
    )
    _, alone = attribute(tasks, start=span.started, end=span.ended)
    _, overlapped = attribute(tasks, start=span.started, end=span.ended, others=[ahead])
    busy = [next(role.busy for role in times.roles if role.role == "rollout") for times in (alone, overlapped)]
    assert busy[1] - busy[0] == pytest.approx(2.0)


def test_the_waiting_roles_wait_for_the_rollout_and_nothing_is_charged_to_the_waiter():
    tasks, span = iteration()
    _, times = attribute(tasks, start=span.started, end=span.ended)
    reference = next(role for role in times.roles if role.role == "reference")
    assert reference.busy == pytest.approx(0.5)
    assert reference.waiting == pytest.approx({"rollout": 3.0, "controller": 0.02})
    assert times.path_seconds()["rollout", Kind.EXECUTE] == pytest.approx(3.0)
