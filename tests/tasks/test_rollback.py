"""Where a rollback goes: to the newest of what is whole, and never behind a checkpoint that counts what it cuts."""

from pathlib import Path

import pytest

from resources.checkpoints import Manifest
from resources.cluster import Cluster
from resources.run_directory import RunDirectory
from tasks.hosts import HostSet
from tasks.recovery import _restored
from tasks.run_state import RunState
from tasks.saves import save_last_iteration
from tasks.session import Session
from tasks.snapshots import Snapshot
from tests.tasks.local_cast import small_config

LINE = len('{"iteration": 0}\n')


@pytest.fixture
def run(run_dir: Path) -> Session:
    """Eight iterations are done; 7 and 8 are on the disk, 5 is in memory."""
    config = small_config("checkpoint={every: 1, asynchronous: false, keep: 2}", "recovery.snapshot_every=5")
    directory = RunDirectory.create(run_dir, "rollback")
    hosts = HostSet(run_id="rollback", role_pools={}, steps=[], placements={}, config=config, env={})
    session = Session(config, directory, Cluster("rollback", run_dir=directory.path), hosts)
    for iteration in range(8):
        directory.append(directory.metrics, {"iteration": iteration})
    for iteration in (7, 8):
        staging = session.checkpoints.begin(iteration)
        (staging / "weights").write_bytes(b"weights %d" % iteration)
        session.checkpoints.commit(staging, manifest(iteration))
    session.state = RunState(iteration=8)
    session.snapshot = snapshot(5)
    return session


def manifest(iteration: int) -> Manifest:
    return Manifest(
        run_id="rollback", iteration=iteration, policy_version=iteration, data_position={}, kl_coef=0.0,
        config_digest="d", metrics_bytes=iteration * LINE, state=RunState(iteration=iteration).to_json(),
    )  # fmt: skip


def snapshot(iteration: int) -> Snapshot:
    state = RunState(iteration=iteration)
    return Snapshot(state=state, metrics_bytes=iteration * LINE, pieces={}, manifest=manifest(iteration))


def damage(run: Session, iteration: int) -> None:
    (run.checkpoints.path_of(iteration) / "weights").unlink()


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_gone_back_to_and_can_still_be_resumed_from(run: Session):
    assert _restored(run)
    assert run.state.iteration == 8
    assert run.resumed_folder == str(run.checkpoints.path_of(8))
    newest, problems = run.checkpoints.latest(run.directory.metrics)
    assert newest is not None
    assert (newest.iteration, problems) == (8, [])


def test_the_snapshot_is_gone_back_to_where_each_newer_checkpoint_is_damaged_and_a_stopped_run_saves_it(run: Session):
    damage(run, 7)
    damage(run, 8)
    assert _restored(run)
    assert (run.state.iteration, run.resumed_folder) == (5, None)
    assert run.directory.metrics.stat().st_size == 5 * LINE
    save_last_iteration(run)
    newest, _ = run.checkpoints.latest(run.directory.metrics)
    assert newest is not None
    assert newest.iteration == 5


def test_a_snapshot_of_the_newest_checkpoints_iteration_is_gone_back_to_in_memory(run: Session):
    run.snapshot = snapshot(8)
    assert _restored(run)
    assert (run.state.iteration, run.resumed_folder) == (8, None)


@pytest.mark.parametrize(("spare", "iteration"), [(6, 7), (7, 7)])
def test_of_an_older_snapshot_and_an_older_checkpoint_the_newer_is_gone_back_to(
    run: Session, spare: int, iteration: int
):
    damage(run, 8)
    run.snapshot, run.spare = None, snapshot(spare)
    assert _restored(run)
    assert run.state.iteration == iteration
    assert run.resumed_folder == str(run.checkpoints.path_of(7))


def test_there_is_nothing_to_go_back_to_without_a_whole_snapshot_or_checkpoint(run: Session):
    damage(run, 7)
    damage(run, 8)
    run.snapshot = None
    assert not _restored(run)
