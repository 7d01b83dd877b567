"""The pool-bound runner: where steps run, what travels, what a failure says."""

import inspect
import os
import time

import pytest
import ray
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import EngineContext, SyncClientContext
from prefect.task_engine import run_task_sync
from prefect_ray.task_runners import PrefectRayFuture, RayTaskRunner

from resources.store import BatchHandle
from tasks.call import encode
from tasks.collect import StepFailedError, collect, payload_bytes, spans_of
from tasks.host import host
from tasks.hosts import HostLostError, HostSet, start_hosts
from tasks.replies import Call
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step

ROLES = {"rollout": "sampling", "reward": "sampling", "actor": "training"}


@step(role="rollout", writes=("scores",))
def sample(policy_version: int) -> StepResult:
    return StepResult(
        handle=BatchHandle(pool=host().pool, batch_id="b"), facts={"pool": host().pool, "pid": os.getpid()}
    )


@step(role="actor")
def update(batch: BatchHandle, policy_version: int = 0, sleep: float = 0.0) -> StepResult:
    time.sleep(sleep)
    return StepResult(metrics={"actor/loss": 0.5}, facts={"pool": host().pool, "read": batch.pool})


@step(role="actor")
def fail(policy_version: int = 0) -> StepResult:
    raise ValueError("no gradient")


class StubbornError(Exception):
    """Pickles, but cannot be made again from what was pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@step(role="actor")
def fail_stubbornly() -> StepResult:
    raise StubbornError("a", "b")


@step(role="actor")
def call_often(number: int, seconds: float) -> StepResult:
    """A step of many calls, as dynamic sampling is one, with a group that takes `seconds` for each."""
    for _ in range(number):
        Call(duty="actor", pending=SlowAnswer(seconds), is_bulk=False).wait()
    return StepResult(metrics={"calls": float(number)})


class SlowAnswer:
    """A call on its way."""

    spans = ()

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def result(self) -> None:
        time.sleep(self._seconds)


@step(role="reward")
def die() -> StepResult:
    os._exit(3)


@pytest.fixture(scope="module")
def hosts(prefect_session: None, ray_session: None):
    with start_hosts(run_id="runner-test", role_pools=ROLES, steps=[sample, update, call_often, fail, die]) as started:
        yield started


def rows_of(flow_run_id, wanted: int) -> list:
    """Task rows of a flow run; they arrive by events, so they are awaited."""
    for _ in range(150):
        with get_client(sync_client=True) as client:
            rows = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
        if len(rows) >= wanted and all(row.state_name not in ("Pending", "Running") for row in rows):
            return rows
        time.sleep(0.1)
    raise AssertionError(f"{len(rows)} of {wanted} rows: {[(row.name, row.state_name) for row in rows]}")


def test_the_private_names_we_lean_on_exist():
    assert "_final_state" in vars(PrefectRayFuture(task_run_id=None, wrapped_future=None))
    assert {"task", "task_run_id", "parameters", "wait_for", "return_type"} <= set(
        inspect.signature(run_task_sync).parameters
    )
    assert {"flow_run", "task_runner", "result_store", "persist_result", "log_prints", "detached"} <= set(
        EngineContext.model_fields
    )
    assert hasattr(SyncClientContext, "__var__")
    assert "client" in SyncClientContext.model_fields
    assert list(inspect.signature(RayTaskRunner.submit).parameters) == [
        "self",
        "task",
        "parameters",
        "wait_for",
        "dependencies",
    ]
    assert "_started" in inspect.getsource(RayTaskRunner.submit)


def test_each_step_runs_in_the_host_of_its_role_and_every_row_is_recorded(hosts: HostSet):
    ids = []

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        ids.append(EngineContext.get().flow_run.id)
        first = sample.submit(policy_version=4)
        second = update.submit(first, policy_version=4)
        return collect([first, second], 60)

    sampled, updated = iteration()
    assert sampled.facts["pool"] == "sampling"
    assert sampled.facts["pid"] != os.getpid()
    assert updated.facts == {"pool": "training", "read": "sampling"}
    rows = {row.name: row for row in rows_of(ids[0], 2)}
    assert set(rows) == {"sample/sampling/v4", "update/training/v4"}
    upstream = rows["update/training/v4"].task_inputs["batch"]
    assert [one.id for one in upstream] == [rows["sample/sampling/v4"].id]
    assert {row.run_count for row in rows.values()} == {1}


def test_spans_say_where_time_and_bytes_went(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        first = sample.submit(policy_version=4)
        second = update.submit(first, sleep=0.2)
        collect([first, second], 60)
        return spans_of([first, second], iteration=7)

    one, two = iteration()
    assert (one.task, one.role, one.pool, one.iteration, one.upstream) == ("sample", "rollout", "sampling", 7, ())
    assert two.upstream == ("sample",)
    assert one.submitted <= one.started <= one.ended <= two.started
    assert two.ended - two.started >= 0.2
    assert two.waits.upstream == pytest.approx(max(0.0, one.ended - two.submitted))
    assert payload_bytes([one, two]) == sum(span.dispatch.bytes + span.collect.bytes for span in (one, two)) > 0


def test_wait_for_orders_steps_and_shows_in_the_graph(hosts: HostSet):
    ids = []

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        ids.append(EngineContext.get().flow_run.id)
        first = update.submit(BatchHandle(pool="x", batch_id="b"), policy_version=1, sleep=0.3)
        second = sample.submit(policy_version=2, wait_for=[first])
        collect([first, second], 60)
        return spans_of([first, second], 0)

    one, two = iteration()
    assert two.started >= one.ended
    rows = {row.name: row for row in rows_of(ids[0], 2)}
    assert [one.id for one in rows["sample/sampling/v2"].task_inputs["wait_for"]] == [rows["update/training/v1"].id]


def test_a_failed_step_names_itself_its_pool_and_its_error_and_what_follows_never_runs(hosts: HostSet):
    ids = []

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        ids.append(EngineContext.get().flow_run.id)
        bad = fail.submit(policy_version=3)
        after = update.submit(bad, policy_version=3)
        collect([after, bad], 60)

    with pytest.raises(StepFailedError, match="step 'fail' in pool 'training': no gradient") as caught:
        iteration()
    assert isinstance(caught.value.__cause__, ValueError)
    states = {row.name.split("/")[0].split("-")[0]: row.state_name for row in rows_of(ids[0], 2)}
    assert states == {"fail": "Failed", "update": "NotReady"}


def test_an_error_that_does_not_unpickle_keeps_its_text(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        collect([fail_stubbornly.submit()], 60)

    with pytest.raises(StepFailedError, match="ab"):
        iteration()


def test_a_step_without_a_pool_is_refused_before_anything_starts():
    @step(role="teacher")
    def teach() -> StepResult:
        return StepResult()

    with pytest.raises(ValueError, match="step 'teach' has role 'teacher', which stands in no pool"):
        HostSet(run_id="r", role_pools=ROLES, steps=[teach])


def test_a_plain_prefect_task_is_refused_with_the_way_out(hosts: HostSet):
    @task
    def plain() -> int:
        return 1

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        plain.submit()

    with pytest.raises(ValueError, match=r"task 'plain' has no role, so no pool; declare it with @step"):
        iteration()


def test_an_object_ref_between_tasks_is_refused(ray_session: None):
    with pytest.raises(TypeError, match="between tasks pass the BatchHandle"):
        encode({"batch": [ray.put(1)]})


def test_a_deadline_counts_from_the_last_step_that_ended_and_not_over_all_of_them(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        batch, chain = BatchHandle(pool="x", batch_id="b"), []
        for _ in range(5):
            chain.append(update.submit(batch, sleep=2.0, wait_for=chain[-1:]))
        return collect(chain, 8.0)

    assert len(iteration()) == 5


def test_a_step_whose_calls_are_answered_goes_on_after_the_deadline(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        return collect([call_often.submit(40, 0.2)], 6.0, quiet_seconds=hosts.quiet_seconds)

    assert iteration()[0].metrics == {"calls": 40.0}


def test_a_deadline_names_what_is_pending(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        slow = update.submit(BatchHandle(pool="x", batch_id="b"), sleep=1.0)
        try:
            collect([slow], 0.2)
        finally:
            slow.wait()

    with pytest.raises(TimeoutError, match=r"after 0\.2 s without progress still pending: update in pool training"):
        iteration()


def test_a_dead_host_is_named_and_a_new_one_takes_over(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        dying = die.submit()
        after = update.submit(dying)
        try:
            collect([after, dying], 60)
        finally:
            after.wait()

    with pytest.raises(HostLostError, match=r"step 'die'.*pool 'sampling'"):
        iteration()
    hosts.restart(["sampling"])

    @flow(task_runner=ON_POOLS, persist_result=False)
    def again():
        return collect([sample.submit(policy_version=1)], 60)

    assert again()[0].facts["pool"] == "sampling"


def test_hosts_that_died_together_come_back_together(hosts: HostSet):
    for pool in ("sampling", "training"):
        ray.kill(hosts.host_of(pool))
    hosts.restart(["sampling", "training"])
    assert sorted(hosts.batch_ids()) == ["sampling", "training"]


def test_what_a_step_costs_in_bytes_is_small(hosts: HostSet):
    """Neither flow, nor parameters, nor settings travel: nine steps stay far below 64 KiB."""

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration(ballast: str):
        one = sample.submit(policy_version=1)
        collect([one], 60)
        return payload_bytes(spans_of([one], 0))

    assert iteration("x" * 200_000) < 9_000
