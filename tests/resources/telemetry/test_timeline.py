"""What a stretch before a task is charged to: serialising, weights on their way, scheduling."""

import pytest

from resources.telemetry.attribution import attribute
from resources.telemetry.spans import Dispatch, RankSpan, TaskSpan
from resources.telemetry.timeline import Kind, build_timeline
from tests.resources.telemetry.scenarios import iteration


def task(name: str, submitted: float, start: float, end: float, *, sending: float = 0.0, unpack: float = 0.0, **facts):
    """A task of one rank after the rollout."""
    return TaskSpan(
        iteration=0, task=name, role=name, pool=name, submitted=submitted, started=start, ended=end,
        upstream=() if name == "rollout" else ("rollout",),
        ranks=(RankSpan(rank=0, start=start, end=end, facts=facts),),
        dispatch=Dispatch(serialize_seconds=sending, unpack_seconds=unpack),
    )  # fmt: skip


def test_a_task_waits_for_what_the_controller_serialises_for_its_siblings_too():
    spans = [
        task("rollout", 0.0, 0.0, 1.0),
        task("reference", 1.0, 1.5, 3.0, sending=0.5),
        task("critic", 1.5, 2.1, 3.0, sending=0.5),
    ]
    timeline = build_timeline(spans, 0.0, 3.0)
    assert timeline.tasks["reference"].seconds(Kind.SERIALIZE) == pytest.approx(0.5)
    assert timeline.tasks["critic"].seconds(Kind.SERIALIZE) == pytest.approx(1.0)
    assert timeline.tasks["critic"].seconds(Kind.SCHEDULING) == pytest.approx(0.1)


def test_what_the_host_unpacks_counts_as_serialising():
    spans = [task("rollout", 0.0, 0.0, 1.0), task("critic", 0.2, 1.5, 3.0, sending=0.1, unpack=0.4)]
    timeline = build_timeline(spans, 0.0, 3.0)
    assert timeline.tasks["critic"].seconds(Kind.SERIALIZE) == pytest.approx(0.4)
    assert timeline.tasks["critic"].seconds(Kind.SCHEDULING) == pytest.approx(0.1)


def test_an_engine_that_loads_weights_while_its_task_is_ready_waits_for_weights():
    spans = [task("rollout", 0.0, 1.0, 2.0, weights_seconds=0.4, weights_age_seconds=0.1)]
    timeline = build_timeline(spans, 0.0, 2.0)
    assert timeline.tasks["rollout"].seconds(Kind.WEIGHTS) == pytest.approx(0.4)
    assert timeline.tasks["rollout"].seconds(Kind.SCHEDULING) == pytest.approx(0.6)


def test_weights_that_came_before_the_task_was_ready_held_up_nobody():
    spans = [task("rollout", 0.0, 1.0, 2.0, weights_seconds=0.4, weights_age_seconds=1.0)]
    assert build_timeline(spans, 0.0, 2.0).tasks["rollout"].seconds(Kind.WEIGHTS) == 0.0


def test_the_engines_wait_for_weights_during_the_sync_and_their_parts_still_add_up():
    tasks, span = iteration()
    _, times = attribute(tasks, start=span.started, end=span.ended)
    rollout = next(role for role in times.roles if role.role == "rollout")
    assert rollout.waiting["weights"] == pytest.approx(0.3)
    assert rollout.total == pytest.approx(times.step_seconds)
