"""Pools on machines that booted hours apart: whatever is measured on them stands on the controller's clock.

Every test node shares one kernel and its clock, so hosts are given another one: `sitecustomize` puts an offset on it
before anything of them is imported.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow

from resources.served_group import _FrontCall
from resources.telemetry.attribution import attribute
from resources.telemetry.causes import Cause
from resources.telemetry.live import IterationView, view_iteration
from resources.telemetry.reader import SpanReader
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from resources.telemetry.spans import IterationSpan, TaskSpan
from resources.telemetry.verdict import judge
from tasks.collect import collect, spans_of
from tasks.hosts import HostSet, start_hosts
from tasks.runner import ON_POOLS, StepFuture, _span_of, _Submission
from tasks.step import StepResult, step
from tests.resources.telemetry.scenarios import grader_facts, iteration, run_record

HOUR = 3600.0
EVEN: dict[str, float] = dict.fromkeys(("rollout", "reward", "reference", "actor", "critic", "advantage"), 0.0)
APART = {**EVEN, "rollout": 7 * HOUR, "reward": -30 * HOUR, "critic": 0.25}


def as_measured(spans: list[TaskSpan], offsets: Mapping[str, float]) -> list[TaskSpan]:
    """The spans that come of what hosts with these clocks and their workers tell of the same steps."""
    sent: dict[str, StepFuture] = {}
    for span in spans:
        offset = offsets[span.pool]
        submission = _Submission(
            task=span.task, role=span.role, pool=span.pool, upstream=tuple(sent[name] for name in span.upstream),
            submitted=span.submitted or 0.0, clock_offset=offset,
        )  # fmt: skip
        timing = {
            "node": span.pool, "unpack_seconds": 0.0, "started": span.started + offset, "ended": span.ended + offset,
            "collect_seconds": 0.0, "collect_bytes": 0, "ranks": [rank.to_json() for rank in span.ranks],
        }  # fmt: skip
        future = sent[span.task] = StepFuture(uuid4(), None, None, submission)
        future._span = _span_of(submission, timing, (0.0, 0))
    return [span for future in sent.values() if (span := future.span()) is not None]


def step_of(offsets: Mapping[str, float]) -> tuple[list[TaskSpan], IterationSpan]:
    """An iteration of 8.7 s of which 2 s are a grader's, measured on such machines; the controller's clock is at 50."""
    tasks, span = iteration(0, 50.0, seconds={"reward": 2.0}, facts={"reward": grader_facts([0.5] * 8)})
    return as_measured([replace(task, submitted=span.started) for task in tasks], offsets), span


def figures(view: IterationView) -> Any:
    return pytest.approx(view.metrics(), abs=1e-6)


def test_the_live_view_of_machines_hours_apart_is_that_of_one_machine():
    (even, span), (apart, _) = step_of(EVEN), step_of(APART)
    view, found = view_iteration(even, span), view_iteration(apart, span)
    assert found.metrics() == figures(view)
    assert found.verdict.line == view.verdict.line
    assert (found.verdict.role, found.verdict.cause) == ("reward", Cause.SLOW_GRADER)
    assert found.metrics()["time/rollout/busy"] == pytest.approx(3.0)
    assert [one.waits.upstream for one in apart] == pytest.approx([one.waits.upstream for one in even])
    assert apart[1].waits.upstream == pytest.approx(3.01)


def test_the_file_of_machines_hours_apart_reads_like_that_of_one_machine(tmp_path: Path):
    apart, span = step_of(APART)
    SpanFile(tmp_path / SPANS_FILE).append(run_record(), *apart, span)
    reader = SpanReader(path=tmp_path)
    (record,) = reader.iterations()
    assert reader.missing == ()
    timeline, _ = attribute(record.tasks, start=span.started, end=span.ended)
    even, _ = attribute(step_of(EVEN)[0], start=span.started, end=span.ended)
    assert judge(timeline).line == judge(even).line


def test_rollout_servers_tell_their_times_by_the_controllers_clock_too():
    answered: Future[Any] = Future()
    answered.set_result(([], [{"rank": 0, "queue_seconds": 0.0, "start": 7 * HOUR + 5.0, "end": 7 * HOUR + 8.0}]))
    assert _FrontCall(answered, 1.0, -7 * HOUR).spans == [{"rank": 0, "queue_seconds": 0.0, "start": 5.0, "end": 8.0}]


@step(role="rollout")
def work() -> StepResult:
    time.sleep(0.1)
    return StepResult(facts={"now": time.monotonic()})


@step(role="actor")
def work_on(before: Any) -> StepResult:
    return work.fn()


class Boots:
    """When the machines of hosts that are started from now on were booted."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.set(7 * HOUR)
        code = f"import time\nreal = time.monotonic\noffset = float(open({str(self._file)!r}).read())\n"
        (folder / "sitecustomize.py").write_text(f"{code}time.monotonic = lambda: real() + offset\n")
        self.env = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}

    def set(self, offset: float) -> None:
        self._file.write_text(str(offset))


@pytest.fixture
def boots(tmp_path: Path) -> Boots:
    return Boots(tmp_path)


@pytest.fixture
def hosts(boots: Boots, prefect_session: None, ray_session: None) -> Iterator[HostSet]:
    roles = {"rollout": "sampling", "actor": "training"}
    with start_hosts(run_id="clocks", role_pools=roles, steps=[work, work_on], env=boots.env) as started:
        yield started


@flow(task_runner=ON_POOLS, persist_result=False)
def two_steps() -> tuple[list[StepResult], list[TaskSpan]]:
    first = work.submit()
    second = work_on.submit(first)
    return collect([first, second], 60), spans_of([first, second], 0)


def test_steps_of_a_pool_that_moves_to_a_machine_booted_at_another_time_stay_in_order(hosts: HostSet, boots: Boots):
    begun = time.monotonic()
    for offset in (7 * HOUR, -300 * HOUR):
        if offset < 0.0:
            boots.set(offset)
            hosts.restart(["sampling"])
        results, (one, two) = two_steps()
        assert results[0].facts["now"] == pytest.approx(one.ended + offset, abs=1.0)
        assert results[1].facts["now"] == pytest.approx(two.ended + 7 * HOUR, abs=1.0)
        assert begun < one.submitted < one.started < one.ended < two.started < two.ended < time.monotonic()  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
        assert 0.05 < two.waits.upstream < 60.0
