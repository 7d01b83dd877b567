"""What a run's end and its disk make of a save: nothing that is whole is lost, and what is told is what happened."""

from pathlib import Path

import pytest

from resources.checkpoints import Manifest
from resources.cluster import Cluster
from resources.run_directory import RunDirectory, read_lines
from tasks.hosts import HostSet
from tasks.run_state import RunState
from tasks.saves import publish, save_last_iteration
from tasks.session import Session
from tasks.snapshots import Snapshot
from tests.tasks.local_cast import small_config


@pytest.fixture
def run(run_dir: Path) -> Session:
    """A session that has started nothing; it keeps one checkpoint."""
    config = small_config("checkpoint.keep=1")
    directory = RunDirectory.create(run_dir, "saves")
    hosts = HostSet(run_id="saves", role_pools={}, steps=[], placements={}, config=config, env={})
    return Session(config, directory, Cluster("saves", run_dir=directory.path), hosts)


def manifest(iteration: int) -> Manifest:
    return Manifest(
        run_id="saves", iteration=iteration, policy_version=iteration, data_position={}, kl_coef=0.0,
        config_digest="d", metrics_bytes=0,
    )  # fmt: skip


def save(run: Session, iteration: int) -> None:
    staging = run.checkpoints.begin(iteration)
    (staging / "weights").write_bytes(b"weights %d" % iteration)
    publish(run, staging, manifest(iteration), {})


def kinds(run: Session) -> list[str]:
    return [event["kind"] for event in read_lines(run.directory.events)]


@pytest.mark.parametrize(("done", "newest"), [(41, 41), (42, 42), (39, 40)])
def test_a_stopped_run_saves_its_last_iteration_beside_or_over_a_damaged_checkpoint(
    run: Session, done: int, newest: int
):
    """It had gone on from 40, since 42 was damaged."""
    staging = run.checkpoints.begin(42)
    (staging / "weights").write_bytes(b"weights 42")
    damaged = run.checkpoints.commit(staging, manifest(42))
    save(run, 40)
    (damaged / "weights").unlink()
    assert run.checkpoints.newest().iteration == 40
    run.snapshot = Snapshot(state=RunState(iteration=done), metrics_bytes=0, pieces={}, manifest=manifest(done))
    save_last_iteration(run)
    assert run.checkpoints.newest().iteration == newest
    assert run.failed_saves == 0


def test_a_save_counts_though_an_older_checkpoint_could_not_be_removed(run: Session):
    save(run, 1)
    staging = run.checkpoints.begin(2)
    (staging / "weights").write_bytes(b"weights 2")
    in_the_way = run.checkpoints.folder / ".writing-000001-removed"
    in_the_way.touch()  # a folder cannot be renamed onto a file
    publish(run, staging, manifest(2), {})
    assert run.checkpoints.newest().iteration == 2
    assert run.failed_saves == 0
    assert kinds(run) == ["checkpoint", "checkpoint", "prune-failed"]
    save(run, 3)  # it is still in the way, and costs no later save either
    assert run.checkpoints.newest().iteration == 3
    assert run.failed_saves == 0
    in_the_way.unlink()
    save(run, 4)
    assert run.checkpoints.iterations() == [4]
