"""A node goes: its roles move to the nodes that are left, or the run gets smaller, or it ends and can be resumed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from configs.run import RunConfig
from flows.ppo import ppo
from tasks.rebuild import NoNodesLeftError
from tasks.session import _CURRENT, Session
from tests.chaos.faults import running_steps
from tests.chaos.runs import assert_same_run, events_of, metrics_of, tiny_config

Undisturbed = Callable[[RunConfig], Path]
AddNode = Callable[[str, int], Any]
ITERATIONS = 10
"""Enough for the first copy of a snapshot to another node, whose process has to start."""


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster whose head holds the controller and nothing else."""
    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "node_ip_address": "127.0.0.2",
            "object_store_memory": 150_000_000,
            "include_dashboard": False,
        },
    )
    yield cluster
    if ray.is_initialized():
        ray.shutdown()
    cluster.shutdown()


@contextmanager
def removed_in(cluster: Cluster, iteration: int, choose: Callable[[Session], Any]) -> Iterator[None]:
    """The node that `choose` picks is removed, from a thread, once that iteration runs."""
    over = threading.Event()

    def is_due(run: Session) -> bool:
        """Once a snapshot is on two nodes: before, the run goes back to its last checkpoint or its start."""
        is_safe = run.spare is not None or (run.snapshot is not None and run.snapshot.is_copied)
        return run.state.iteration >= iteration and is_safe

    def watch() -> None:
        while not over.wait(0.01):
            if _CURRENT and is_due(_CURRENT[-1]) and running_steps(_CURRENT[-1]):
                cluster.remove_node(choose(_CURRENT[-1]), allow_graceful=False)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=60.0)


def add(cluster: Cluster, ip: str, num_cpus: int) -> Any:
    return cluster.add_node(num_cpus=num_cpus, node_ip_address=ip, object_store_memory=150_000_000)


def node_of_pool(cluster: Cluster, run: Session, pool: str, bundle: int = 0) -> Any:
    wanted = run.cluster.pools[pool].bundles[bundle].place.node_id
    return next(node for node in cluster.list_all_nodes() if node.node_id == wanted)


def config_on(cluster: Cluster, run_dir: Path, name: str, **sections: Any) -> RunConfig:
    where = {"address": cluster.address, "num_cpus": None}
    return tiny_config(run_dir, name, "split", iterations=ITERATIONS, engine="scripted", ray=where, **sections)


def on_one_machine(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"ray": config.ray.model_copy(update={"address": None, "num_cpus": 8})})


@pytest.mark.parametrize("pool", ["learn", "sample", "judge"])
def test_the_roles_of_a_lost_node_move(pool: str, nodes: Cluster, run_dir: Path, undisturbed: Undisturbed):
    config = config_on(nodes, run_dir, f"move-{pool}")
    expected = undisturbed(on_one_machine(config))
    for ip in ("127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6"):
        add(nodes, ip, 1)  # three pools and a spare; the head holds none, since the controller is there
    with removed_in(nodes, 2, lambda run: node_of_pool(nodes, run, pool)):
        ppo(config)
    run = run_dir / f"move-{pool}"
    moved = [event for event in events_of(run, "recovered") if f"pool {pool}" in event["rebuilt"]]
    assert moved
    assert all(event["rolled_back_to"] >= event["iteration"] - 2 for event in moved)
    assert_same_run(run, expected)


def test_without_a_spare_node_the_run_ends_resumable(nodes: Cluster, run_dir: Path, prefect_session: None):
    pools = {
        "learn": {"nodes": [1], "cpus_per_bundle": 2},
        "sample": {"nodes": [1], "cpus_per_bundle": 1},
        "judge": {"nodes": [1], "cpus_per_bundle": 1},
    }
    config = config_on(nodes, run_dir, "no-spare", pools=pools, checkpoint={"every": 1})
    add(nodes, "127.0.0.3", 2)
    node = add(nodes, "127.0.0.4", 2)
    with removed_in(nodes, 2, lambda run: node), pytest.raises(NoNodesLeftError, match="can be resumed"):
        ppo(config)
    assert [line["iteration"] for line in metrics_of(run_dir / "no-spare")][:2] == [0, 1]


def test_a_role_that_may_be_smaller_goes_on_with_fewer_ranks(nodes: Cluster, run_dir: Path, undisturbed: Undisturbed):
    pools = {
        "learn": {"bundles": 2, "cpus_per_bundle": 1},
        "sample": {"nodes": [1], "cpus_per_bundle": 1},
        "judge": {"nodes": [1], "cpus_per_bundle": 1},
    }
    roles = {"actor": {"pool": "learn", "workers": 2}, "critic": {"pool": "learn", "workers": 2}}
    config = config_on(
        nodes, run_dir, "smaller", pools=pools, roles=roles, recovery={"allow_smaller": True}, checkpoint={"every": 1}
    )
    for ip in ("127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6"):
        add(nodes, ip, 1)
    expected = undisturbed(on_one_machine(config))
    with removed_in(nodes, 2, lambda run: node_of_pool(nodes, run, "learn", bundle=1)):
        ppo(config)
    lines = metrics_of(run_dir / "smaller")
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    assert events_of(run_dir / "smaller", "smaller")
    [recovered] = events_of(run_dir / "smaller", "recovered")
    replayed, same = lines[recovered["rolled_back_to"]], metrics_of(expected)[recovered["rolled_back_to"]]
    assert replayed["reward/score_mean"] == same["reward/score_mean"]  # the same rows
    for loss in ("actor/loss", "critic/loss"):
        assert replayed[loss] == pytest.approx(same[loss], abs=1e-5)
