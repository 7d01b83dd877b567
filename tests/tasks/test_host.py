"""The task host: data between pools by reference, released after its last reader, and what a step may reach."""

import time

import pytest
import ray
import torch
from prefect import flow
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from resources.batch import make_shard
from resources.rows import ShardRef
from resources.store import BatchHandle, BatchStore, StoreError, StoreView
from tasks.collect import StepFailedError, collect
from tasks.host import HostContext, host, use_host
from tasks.hosts import HostSet, start_hosts, worker_env
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step

ROLES = {"rollout": "sampling", "critic": "training"}


@step(role="rollout", writes=("response_lengths",))
def fill(batch_id: str, rows: int) -> StepResult:
    ids = list(range(rows))
    data = make_shard({"row_ids": torch.tensor(ids), "response_lengths": torch.tensor([2 * row for row in ids])})
    return StepResult(
        handle=host().add(batch_id, [ShardRef(ray.put(data), tuple(ids), ("row_ids", "response_lengths"))])
    )


@step(role="critic", reads=("response_lengths",), writes=("scores",))
def score(batch: BatchHandle) -> StepResult:
    loaded = host().read(batch).load()
    values = loaded["response_lengths"].float() + host().group("offset")
    shard = make_shard({"row_ids": loaded["row_ids"], "scores": values})
    ids = tuple(loaded["row_ids"].tolist())
    handle = host().add(batch, [ShardRef(ray.put(shard), ids, ("row_ids", "scores"))])
    return StepResult(handle=handle, metrics={"sum": float(values.sum())})


@step(role="rollout", reads=("response_lengths", "scores"))
def look(batches: list[BatchHandle]) -> StepResult:
    loaded = host().read(*batches).load()
    return StepResult(metrics={"rows": float(len(loaded["scores"])), "last": float(loaded["scores"][-1])})


@step(role="critic", writes=("values",))
def add_undeclared(batch_id: str) -> StepResult:
    data = make_shard({"row_ids": torch.tensor([0]), "scores": torch.tensor([1.0])})
    return StepResult(handle=host().add(batch_id, [ShardRef(data, (0,), ("row_ids", "scores"))]))


@step(role="critic", reads=("advantages",))
def read_missing(batch: BatchHandle) -> StepResult:
    host().read(batch)
    return StepResult()


@pytest.fixture(scope="module")
def hosts(prefect_session: None, ray_session: None):
    steps = [fill, score, look, add_undeclared, read_missing]
    with start_hosts(run_id="host-test", role_pools=ROLES, steps=steps) as started:
        started.attach({"offset": 10.0})
        yield started


def awaited(hosts: HostSet, wanted: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Releases between hosts are not waited for by the step, so they are here."""
    for _ in range(100):
        if (held := hosts.batch_ids()) == wanted:
            return held
        time.sleep(0.05)
    return hosts.batch_ids()


def test_columns_cross_pools_by_reference_and_go_after_their_last_reader(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        filled = fill.submit("one", 4)
        scored = score.submit(filled)
        looked = look.submit([filled, scored])
        return collect([filled, scored, looked], 60)

    filled, scored, looked = iteration()
    assert filled.handle == BatchHandle(pool="sampling", batch_id="one")
    assert scored.handle == BatchHandle(pool="training", batch_id="one")
    assert scored.metrics["sum"] == 0 + 2 + 4 + 6 + 40
    assert looked.metrics == {"rows": 4.0, "last": 16.0}
    assert awaited(hosts, {"sampling": (), "training": ()}) == {"sampling": (), "training": ()}


def test_a_handle_crosses_flow_borders_and_a_dropped_batch_says_so(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def first():
        return collect([fill.submit("two", 3)], 60)[0].handle

    @flow(task_runner=ON_POOLS, persist_result=False)
    def second(batch: BatchHandle):
        return collect([score.submit(batch)], 60)[0].metrics["sum"]

    handle = first()
    assert second(handle) == 0 + 2 + 4 + 30
    assert hosts.batch_ids()["sampling"] == ("two",)
    hosts.drop("two")
    with pytest.raises(StepFailedError, match=r"columns .'response_lengths'. of batch 'two' are in none of the pools"):
        second(handle)


def test_a_column_that_was_not_declared_is_refused(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        collect([add_undeclared.submit("three")], 60)

    with pytest.raises(
        StepFailedError, match=r"step 'add-undeclared' adds columns \['scores'\] but declares writes=\['values'\]"
    ):
        iteration()


def test_a_missing_column_is_named(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        filled = fill.submit("four", 2)
        collect([read_missing.submit(filled)], 60)

    with pytest.raises(StepFailedError, match=r"columns \['advantages'\] of batch 'four'"):
        iteration()
    hosts.drop("four")


@step(role="critic")
def name_groups() -> StepResult:
    return StepResult(facts={"groups": sorted(host().groups)})


def test_a_group_that_is_not_attached_again_is_gone_from_every_host(hosts: HostSet):
    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        return collect([name_groups.submit()], 60)[0].facts["groups"]

    hosts.attach({"rollout.0": 1.0, "rollout.1": 2.0})
    hosts.attach({"rollout.0": 1.0, "offset": 10.0})
    assert iteration() == ["offset", "rollout.0"]
    hosts.restart(["training"])
    assert iteration() == ["offset", "rollout.0"]


def test_clocks_of_the_nodes_are_compared(hosts: HostSet):
    for offset in (hosts.clock_offset("sampling"), hosts.clock_offset("training")):
        assert abs(offset.seconds) <= offset.error


def test_a_worker_group_that_is_not_there_is_named():
    context = HostContext(pool="main", run_id="r", store=StoreView(BatchStore("main")), groups={"actor": object()})
    with (
        use_host(context),
        pytest.raises(LookupError, match=r"no worker group does 'critic' in this run; there are \['actor'\]"),
    ):
        host().group("critic")


def test_outside_a_task_host_the_way_out_is_named():
    with pytest.raises(RuntimeError, match="submit the step from a flow that runs with PoolTaskRunner"):
        host()


def test_reading_nothing_is_refused():
    context = HostContext(pool="main", run_id="r", store=StoreView(BatchStore("main")))
    with use_host(context), pytest.raises(StoreError, match="no batch; a step reads exactly one batch"):
        host().read(None, columns=["scores"])


def test_a_host_gets_the_api_address_and_no_path_of_the_controller(prefect_session: None):
    env = worker_env({"MORE": "1"})["env_vars"]
    assert env["PREFECT_API_URL"].startswith("http://127.0.0.1:")
    assert env["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] == "false"
    assert env["MORE"] == "1"
    assert not {"PREFECT_HOME", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_PROFILES_PATH"} & set(env)


@step(role="critic")
def where() -> StepResult:
    return StepResult(facts={"group": ray.get_runtime_context().get_placement_group_id()})


def test_a_step_runs_inside_the_placement_group_of_its_pool(prefect_session: None, ray_session: None):
    group = placement_group([{"CPU": 1}])
    assert group.wait(30)
    bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    @flow(task_runner=ON_POOLS, persist_result=False)
    def iteration():
        return collect([where.submit()], 60)[0].facts["group"]

    with start_hosts(run_id="placed", role_pools={"critic": "main"}, steps=[where], placements={"main": bundle}):
        assert iteration() == group.id.hex()
    remove_placement_group(group)
