"""What a rebuild brings back, and what counts as a death; groups and cluster stand in for real ones."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.layout import ProcessGroup, process_groups
from configs.pools import PoolConfig
from resources.casting import all_duties
from resources.cluster import Cluster
from resources.failures import Failure, WorkerFailed
from resources.pools import Bundle, ResourcePool
from resources.ranks import BundlePlace
from resources.run_directory import RunDirectory
from tasks.hosts import HostSet
from tasks.rebuild import find_deaths, rebuild
from tasks.session import Session
from tests.chaos.runs import tiny_config

FAILURE = Failure(
    kind="signal", detail="SIGKILL", role="critic", group="critic", pool="learn", rank=0, world_size=1,
    node_ip="10.0.0.9", node_id="n", pid=42, incarnation=1,
)  # fmt: skip


class Group:
    """Stands for the processes of one planned group."""

    def __init__(self, name: str, pool: str, silent_seconds: float = 0.0) -> None:
        self.pool = pool
        self.failure: Failure | None = None
        self.processes = SimpleNamespace(
            facts=SimpleNamespace(name=name), actors=[name], running=lambda: [(None, silent_seconds)]
        )
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1
        self.failure = None

    def shutdown(self) -> None:
        self.processes.actors = []


@pytest.fixture
def run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Pools `learn` on node a, `sample` on b, `judge` on c, d to spare; every group is up and every host answers."""
    config = tiny_config(run_dir, "rebuild", "split")
    directory = RunDirectory.create(run_dir, "rebuild")
    pools = {role: placed.pool for role, placed in config.roles.items()}
    hosts = HostSet(run_id="rebuild", role_pools=pools, steps=[], config=config, placements={})
    session = Session(config, directory, Cluster("rebuild", run_dir=directory.path), hosts)
    for name, node in (("learn", "a"), ("sample", "b"), ("judge", "c")):
        stand(session, name, config.pools[name], node)
    session.is_cast = True
    made: dict[str, Any] = {}
    for planned in process_groups(config):
        made |= dict.fromkeys(all_duties(config, planned), Group(planned.name, planned.pool))
    session.groups = made

    def reserve(cluster: Cluster, wanted: dict[str, PoolConfig], deadline_seconds: float) -> None:
        for name, pool in wanted.items():
            stand(session, name, pool, "d")

    monkeypatch.setattr("tasks.rebuild.EVIDENCE_SECONDS", 0.2)
    monkeypatch.setattr(
        "tasks.rebuild.first_bundle", lambda cluster, pool: cluster.pools[pool].bundles[0].place.node_id
    )
    monkeypatch.setattr("tasks.rebuild._answers", lambda run, pool: True)
    monkeypatch.setattr(HostSet, "restart", lambda hosts, pools: None)
    monkeypatch.setattr(HostSet, "attach", lambda hosts, groups: None)
    monkeypatch.setattr(Session, "casting", lambda run: None)
    monkeypatch.setattr(Cluster, "reserve", reserve)
    alive(monkeypatch, "abcd")
    return session


def stand(run: Session, name: str, config: PoolConfig, node: str) -> None:
    """Let a pool of one bundle lie on a node."""
    place = BundlePlace(node_ip="10.0.0.9", node_id=node, group_index=0, bundle_index=0)
    group: Any = None
    bundle = Bundle(group=group, place=place, pool=name, config=config)
    run.cluster.pools._pools[name] = ResourcePool(name, config, [bundle])


def alive(monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    monkeypatch.setattr("tasks.rebuild.ray.nodes", lambda: [{"NodeID": node, "Alive": True} for node in nodes])


def starting(monkeypatch: pytest.MonkeyPatch, dying: str = "") -> list[str]:
    """Names of the groups that are started; the one that is `dying` dies in its constructor the first time."""
    started: list[str] = []

    def start(cluster: Cluster, casting: Any, planned: ProcessGroup) -> dict[str, Any]:
        started.append(planned.name)
        if planned.name == dying and started.count(dying) == 1:
            raise WorkerFailed(FAILURE)
        return {role: Group(planned.name, planned.pool) for role in planned.roles}

    monkeypatch.setattr("tasks.rebuild.start_process_group", start)
    return started


def test_what_a_rebuild_had_not_started_when_a_process_died_in_it_is_started_by_the_next(
    run: Session, monkeypatch: pytest.MonkeyPatch
):
    alive(monkeypatch, "bcd")
    started = starting(monkeypatch, dying="critic")
    everyone = set(run.groups)
    with pytest.raises(WorkerFailed):
        rebuild(run)
    assert started == ["actor", "critic"]
    assert rebuild(run) == ["group critic", "group advantage", "task host learn"]
    assert started == ["actor", "critic", "critic", "advantage"]
    assert set(run.groups) == everyone
    assert run.hosts._placements == {"learn": "d"}


def test_a_pool_that_lost_its_node_is_moved_and_no_other_group_is_touched(
    run: Session, monkeypatch: pytest.MonkeyPatch
):
    alive(monkeypatch, "acd")
    started = starting(monkeypatch)
    kept = {duty: group for duty, group in run.groups.items() if group.pool != "sample"}
    assert rebuild(run) == ["pool sample", "group rollout", "task host sample"]
    assert started == ["rollout"]
    assert {duty: run.groups[duty] for duty in kept} == kept


def test_a_group_whose_restart_was_broken_off_is_restarted_by_the_next_rebuild(
    run: Session, monkeypatch: pytest.MonkeyPatch
):
    starting(monkeypatch)
    critic: Any = run.groups["critic"]
    critic.processes.actors = []
    assert rebuild(run) == ["group critic"]
    assert critic.restarts == 1


def test_before_the_cast_a_lost_node_moves_its_pools_and_starts_no_role(run: Session, monkeypatch: pytest.MonkeyPatch):
    alive(monkeypatch, "bcd")
    started = starting(monkeypatch)
    run.is_cast, run.groups = False, {}
    assert rebuild(run) == ["pool learn", "task host learn"]
    assert (started, run.groups) == ([], {})


def test_a_node_that_the_cluster_gave_up_is_a_death_though_no_process_there_was_heard_to_end(
    run: Session, monkeypatch: pytest.MonkeyPatch
):
    assert not find_deaths(run)
    alive(monkeypatch, "abd")
    assert find_deaths(run)


@pytest.mark.parametrize(
    ("silent_seconds", "has_failed", "is_found"), [(9.0, False, True), (0.0, False, False), (9.0, True, False)]
)
def test_a_silent_rank_is_waited_for_until_its_node_is_given_up_unless_its_group_was_ended(
    run: Session, monkeypatch: pytest.MonkeyPatch, silent_seconds: float, has_failed: bool, is_found: bool
):
    monkeypatch.setattr("tasks.rebuild.NODE_SECONDS", 20.0)
    silent: Any = Group("actor", "learn", silent_seconds)
    silent.failure = replace(FAILURE, kind="exception") if has_failed else None
    run.groups["actor"] = silent
    looks: list[int] = []

    def nodes() -> list[dict[str, Any]]:
        looks.append(1)
        return [{"NodeID": node, "Alive": True} for node in ("bcd" if len(looks) > 10 else "abcd")]

    monkeypatch.setattr("tasks.rebuild.ray.nodes", nodes)
    assert find_deaths(run) is is_found
