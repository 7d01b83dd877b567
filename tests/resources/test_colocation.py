"""The three ways to colocate roles, each with a gloo all-reduce through the injected environment."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.pools import PoolConfig
from resources.cluster import Cluster
from resources.worker_group import WorkerGroup, WorkerSpec, start_group, start_groups
from tests.resources.sample_workers import EchoWorker, OrderWorker, SumWorker


def spec(role: str) -> WorkerSpec:
    return WorkerSpec(role=role, worker=SumWorker)


def use(groups: dict[str, WorkerGroup]) -> list[list[int]]:
    """The same calling code for the three."""
    return [groups["actor"].total(), groups["critic"].total()]


def test_fused_roles_share_a_process_and_reach_each_other(cluster: Cluster) -> None:
    cluster.reserve({"main": PoolConfig(nodes=(2,))})
    groups = start_groups(cluster, cluster.pools["main"], [spec("actor"), spec("critic")], "fused")
    assert use(groups) == [[3, 3], [3, 3]]
    assert groups["actor"].pid() == groups["critic"].pid()
    assert groups["actor"].sibling_pid("critic") == groups["critic"].pid()
    groups["critic"].restart()
    assert groups["actor"].incarnation == groups["critic"].incarnation == 2
    assert use(groups) == [[3, 3], [3, 3]]


def test_ranks_of_fused_roles_get_calls_from_several_threads_in_one_order(cluster: Cluster) -> None:
    """Two ranks that run two collectives in different orders abort each other."""
    cluster.reserve({"main": PoolConfig(nodes=(2,))})
    specs = [WorkerSpec(role=role, worker=OrderWorker, rendezvous=False) for role in ("actor", "critic")]
    groups = start_groups(cluster, cluster.pools["main"], specs, "fused")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change over within a call
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda role: [groups[role].submit("note", role) for _ in range(200)], groups))
    finally:
        sys.setswitchinterval(before)
    first, second = groups["actor"].order()
    assert len(first) == 400
    assert first == second


@pytest.mark.slow
def test_shared_roles_have_processes_and_stores_of_their_own(cluster: Cluster) -> None:
    cluster.reserve({"main": PoolConfig(nodes=(2,), accelerator="gpu", cpus_per_bundle=2)})
    groups = start_groups(cluster, cluster.pools["main"], [spec("actor"), spec("critic")], "shared")
    assert use(groups) == [[3, 3], [3, 3]]
    assert not set(groups["actor"].pid()) & set(groups["critic"].pid())


@pytest.mark.slow
def test_split_roles_work_on_pools_of_their_own(open_run: Callable[[], Cluster]) -> None:
    with open_run() as run:
        run.reserve({"left": PoolConfig(nodes=(2,)), "right": PoolConfig(bundles=2)})
        groups = {
            "actor": start_group(run, run.pools["left"], spec("actor")),
            "critic": start_group(run, run.pools["right"], spec("critic")),
        }
        assert use(groups) == [[3, 3], [3, 3]]
        assert [group.pool for group in groups.values()] == ["left", "right"]


def test_three_roles_at_a_third_each_land_on_one_device(cluster: Cluster) -> None:
    pool = PoolConfig(nodes=(2,), accelerator="gpu", cpus_per_bundle=3)
    cluster.reserve({"main": pool})
    specs = [
        WorkerSpec(role=role, worker=EchoWorker, rendezvous=False, fraction=1 / 3, cpus=1, threads=1)
        for role in ("actor", "rollout", "reference")
    ]
    groups = start_groups(cluster, cluster.pools["main"], specs, "shared")
    devices = [
        [answer["CUDA_VISIBLE_DEVICES"] for answer in group.environment(["CUDA_VISIBLE_DEVICES"])]
        for group in groups.values()
    ]
    assert devices[0] == devices[1] == devices[2]
    assert len(set(devices[0])) == 2
