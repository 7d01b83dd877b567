"""The disk is full, the Prefect server is away: the run goes on."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from configs.run import RunConfig
from flows.ppo import ppo
from resources.checkpoints import CheckpointStore
from resources.process_facts import descendants
from tests.chaos.commands import resume, train, wait_for_iterations, wait_until_gone
from tests.chaos.runs import assert_same_run, events_of, metrics_of, tiny_config

DISK_BYTES = 24 * 2**20
ROOM_BYTES = 1_000_000
"""Enough for metrics, spans and samples, and too little for a checkpoint."""
OUTAGE_SECONDS = 8.0

Undisturbed = Callable[[RunConfig], Path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted in this container")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_full_disk_costs_the_save_and_not_the_run(
    is_asynchronous: bool, small_disk: Path, undisturbed: Undisturbed, prefect_session: None
):
    shape = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "vocab_size": 128}
    config = tiny_config(
        small_disk,
        "full",
        iterations=6,
        model={"shape": {**shape, "max_positions": 32}},  # a checkpoint of 2 MB
        checkpoint={"every": 2, "keep": 1, "asynchronous": is_asynchronous},
    )
    expected = undisturbed(config)
    ballast = small_disk / "ballast"
    filled = threading.Thread(target=_fill_after_first_save, args=(small_disk, ballast))
    filled.start()
    try:
        ppo(config)
    finally:
        filled.join(timeout=60.0)
    run = small_disk / "full"
    assert metrics_of(run) == metrics_of(expected)
    assert events_of(run, "save-failed")
    newest, problems = CheckpointStore(run / "checkpoints").latest()
    assert newest is not None
    assert newest.iteration == 2
    assert not problems


def _fill_after_first_save(disk: Path, ballast: Path) -> None:
    """Leave room for lines of text, not for a checkpoint."""
    while not list((disk / "full" / "checkpoints").glob("iteration-*")):
        time.sleep(0.02)
    with ballast.open("ab", buffering=0) as file:
        while (room := _free_bytes(disk)) > ROOM_BYTES:
            with contextlib.suppress(OSError):  # a save beside the run was faster, and gives its part back
                file.write(b"\0" * min(2**16, room - ROOM_BYTES))


def _free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_a_server_that_goes_away_and_comes_back_costs_nothing(run_dir: Path, tmp_path: Path, undisturbed: Undisturbed):
    home = tmp_path / "prefect"
    config = tiny_config(run_dir, "outage", iterations=6, engine="scripted", prefect={"home": str(home)})
    expected = undisturbed(config)
    command = train(config, run_dir)
    assert wait_for_iterations(command, run_dir / "outage", 2)
    server = _server_pid(home)
    os.kill(server, signal.SIGSTOP)
    time.sleep(OUTAGE_SECONDS)
    os.kill(server, signal.SIGCONT)
    os.kill(server, signal.SIGKILL)  # and then it dies: the embedded server is started again
    assert command.wait() == 0, command.output()[-3000:]
    assert_same_run(run_dir / "outage", expected)
    assert wait_until_gone("outage") == []
    rows = _task_rows(home / "prefect.db")
    assert sorted(rows) == [f"iteration-{number:04d}" for number in range(6)]
    assert len(set(rows.values())) == 1, rows  # as many as before the outage


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_ray_killed_under_a_run_ends_it_and_it_resumes_to_the_same_bits(
    victim: str, run_dir: Path, undisturbed: Undisturbed
):
    """Its head, or the only node there is."""
    name = victim.replace("_", "-")
    settings = {"api_url": PREFECT_API_URL.value()}
    config = tiny_config(run_dir, name, iterations=6, engine="scripted", checkpoint={"every": 1}, prefect=settings)
    expected = undisturbed(config)
    command = train(config, run_dir)
    assert wait_for_iterations(command, run_dir / name, 2)
    [pid] = [pid for pid in descendants([command.process.pid]) if _name(pid) == victim]
    os.kill(pid, signal.SIGKILL)
    assert command.wait() != 0
    assert wait_until_gone(name) == []
    again = resume(run_dir / name, run_dir)
    assert again.wait() == 0, again.output()[-3000:]
    assert_same_run(run_dir / name, expected)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _task_rows(database: Path) -> dict[str, int]:
    """Completed task runs of each iteration's subflow."""
    query = (
        "select flow_run.name, count(*) from task_run join flow_run on flow_run.id = task_run.flow_run_id"
        " where flow_run.name like 'iteration-%' and task_run.state_type = 'COMPLETED' group by flow_run.name"
    )
    with sqlite3.connect(database) as rows:
        return dict(rows.execute(query).fetchall())


def _server_pid(home: Path) -> int:
    from resources.prefect_supervisor import read_record

    record = read_record(home)
    assert record is not None
    supervisor = record.supervisor_pid
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
