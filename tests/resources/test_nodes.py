"""A cluster of three nodes on one machine, with addresses whose numeric and alphabetic orders differ."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as Nodes
from ray.util import placement_group_table

from configs.pools import PoolConfig
from resources.cluster import Cluster
from resources.failures import WorkerFailed
from resources.placement_groups import PoolError
from resources.process_facts import is_running
from resources.ray_state import reread_settings
from resources.worker_group import WorkerSpec, start_group
from tests.resources.sample_workers import EchoWorker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Head without CPUs for pools, then .10 before .9, so that nothing is in order by accident."""
    if ray.is_initialized():
        ray.shutdown()
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
    reread_settings()
    started = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
    for address, cpus in (("127.0.0.10", 3), ("127.0.0.9", 5)):
        started.add_node(node_ip_address=address, num_cpus=cpus, num_gpus=8, object_store_memory=80_000_000)
    ray.init(address=started.address, namespace="tests", log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


def echo(role: str = "echo") -> WorkerSpec:
    return WorkerSpec(role=role, worker=EchoWorker, rendezvous=False)


def test_a_pool_that_may_lie_anywhere_leaves_room_for_one_that_needs_a_whole_node(nodes: Nodes, tmp_path: Path) -> None:
    with Cluster("apart", run_dir=tmp_path) as run:
        run.reserve({"loose": PoolConfig(bundles=4, strategy="SPREAD"), "whole": PoolConfig(nodes=(5,))}, 30.0)
        assert {rank.node_ip for rank in run.pools["whole"].ranks()} == {"127.0.0.9"}  # the only node with five CPUs
        assert "127.0.0.9" not in {rank.node_ip for rank in run.pools["loose"].ranks()}


def test_uneven_pools_have_ranks_in_numeric_order_of_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    with Cluster("uneven", run_dir=tmp_path) as run:
        assert [node.ip for node in run.inventory() if node.ip.startswith("127.")] == ["127.0.0.9", "127.0.0.10"]
        run.reserve({"main": PoolConfig(nodes=(2, 4))})
        assert [rank.node_ip for rank in run.pools["main"].ranks()] == ["127.0.0.9"] * 4 + ["127.0.0.10"] * 2
        group = start_group(run, run.pools["main"], echo())
        keys = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"]
        assert [[answer[key] for key in keys] for answer in group.environment(keys)] == [
            ["0", "0", "4", "0"],
            ["1", "1", "4", "0"],
            ["2", "2", "4", "0"],
            ["3", "3", "4", "0"],
            ["4", "0", "2", "1"],
            ["5", "1", "2", "1"],
        ]


def test_spread_bundles_get_their_local_ranks_from_where_they_landed(nodes: Nodes, tmp_path: Path) -> None:
    with Cluster("spread", run_dir=tmp_path) as run:
        run.reserve({"main": PoolConfig(bundles=4, strategy="SPREAD", accelerator="gpu")})
        first, second = run.pools["main"].node_counts
        ranks = run.pools["main"].ranks()
        assert [rank.node_ip for rank in ranks] == ["127.0.0.9"] * first + ["127.0.0.10"] * second
        assert [rank.local_rank for rank in ranks] == [*range(first), *range(second)]


def test_two_entries_of_eight_are_refused_where_one_node_has_sixteen(nodes: Nodes, tmp_path: Path) -> None:
    big = nodes.add_node(
        node_ip_address="127.0.0.11", num_cpus=32, resources={"big": 16.0}, object_store_memory=80_000_000
    )
    try:
        with Cluster("sixteen", run_dir=tmp_path) as run:
            deadline = time.monotonic() + 20
            while len(run.inventory()) < 4 and time.monotonic() < deadline:
                time.sleep(0.1)
            with pytest.raises(PoolError, match=r"pool main, nodes\[1\]: 8 bundles on one node does not fit"):
                run.reserve({"main": PoolConfig(nodes=(8, 8), accelerator="big")})
            run.reserve({"main": PoolConfig(nodes=(16,), accelerator="big")})
            assert run.pools["main"].node_counts == [16]
    finally:
        nodes.remove_node(big)


def test_the_death_of_a_node_is_told_as_such_and_the_survivors_are_released(nodes: Nodes, tmp_path: Path) -> None:
    lost = nodes.add_node(
        node_ip_address="127.0.0.12", num_cpus=2, resources={"odd": 2.0}, object_store_memory=80_000_000
    )
    other = nodes.add_node(
        node_ip_address="127.0.0.13", num_cpus=2, resources={"odd": 2.0}, object_store_memory=80_000_000
    )
    with Cluster("node-death", run_dir=tmp_path) as run:
        deadline = time.monotonic() + 20
        while len(run.inventory()) < 5 and time.monotonic() < deadline:
            time.sleep(0.1)
        run.reserve({"main": PoolConfig(nodes=(1, 1), accelerator="odd")})
        group = start_group(run, run.pools["main"], echo())
        assert [rank["node"] for rank in group.ranks] == ["127.0.0.12", "127.0.0.13"]
        pending = group.submit("fail", 9, others=60.0, timeout=90)
        time.sleep(1.0)
        for processes in lost.all_processes.values():
            for process in processes:
                os.kill(process.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed) as caught:
            pending.result()
        failure = caught.value.failure
        assert (failure.rank, failure.kind, failure.node_ip) == (0, "node lost", "127.0.0.12")
        deadline = time.monotonic() + 20
        while is_running(group.ranks[1]["pid"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_running(group.ranks[1]["pid"])
    assert [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"] == []
    nodes.remove_node(other)
