"""The controller is killed, told to end, cancelled: what is on the disk is whole, and a resume is exact."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from configs.run import RunConfig
from resources.checkpoints import CheckpointStore
from resources.run_directory import read_lines
from tests.chaos.commands import Command, kill_at_a_point, resume, train, wait_for_iterations, wait_until_gone
from tests.chaos.runs import assert_same_run, events_of, tiny_config

KILLS = 20
KILLS_IN_PART = 2
MAX_ITERATIONS = 60
STOP_SECONDS = 20.0

Undisturbed = Callable[[RunConfig], Path]


def config_of(run_dir: Path, name: str, iterations: int, is_asynchronous: bool = True) -> RunConfig:
    return tiny_config(
        run_dir,
        name,
        iterations=iterations,
        engine="scripted",
        checkpoint={"every": 1, "keep": 2, "asynchronous": is_asynchronous},
        prefect={"api_url": PREFECT_API_URL.value()},
    )


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_controller_killed_anywhere_resumes_to_the_same_bits(
    is_asynchronous: bool, is_part: bool, chaos_seed: int, run_dir: Path, undisturbed: Undisturbed
):
    count = KILLS_IN_PART if is_part else KILLS // 2
    chosen = random.Random(chaos_seed)
    config = config_of(run_dir, "killed", 3 * count, is_asynchronous)
    expected = undisturbed(config)
    run, points = run_dir / "killed", []
    command = train(config, run_dir)
    for _ in range(count):
        points.append(kill_at_a_point(command, run, chosen))
        assert wait_until_gone("killed") == []
        has_begun = (run / "config.yaml").exists()
        command = resume(run, run_dir) if has_begun else train(config, run_dir)
    assert command.wait() == 0, (points, command.output()[-3000:])
    assert_same_run(run, expected)
    assert wait_until_gone("killed") == []
    assert CheckpointStore(run / "checkpoints").latest()[0].iteration == config.iterations
    again = resume(run, run_dir)
    assert again.wait() == 0
    assert "is finished" in again.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_told_to_end_keeps_its_last_iteration_and_leaves_nothing(
    number: signal.Signals, run_dir: Path, prefect_session: None
):
    config = config_of(run_dir, "told", MAX_ITERATIONS)
    command = train(config, run_dir)
    assert wait_for_iterations(command, run_dir / "told", 2)
    begun = time.monotonic()
    command.send(number)
    assert command.wait(STOP_SECONDS) != 0
    check_stopped(run_dir / "told", command, begun)


def test_a_run_cancelled_in_the_ui_ends_and_is_resumable(run_dir: Path, prefect_session: None):
    config = config_of(run_dir, "cancelled", MAX_ITERATIONS)
    command = train(config, run_dir)
    assert wait_for_iterations(command, run_dir / "cancelled", 2)
    flow_run = events_of(run_dir / "cancelled", "started")[0]["flow_run"]
    begun = time.monotonic()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelling())
    assert command.wait(STOP_SECONDS) == 1
    check_stopped(run_dir / "cancelled", command, begun)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run).state.is_final()


def check_stopped(run: Path, command: Command, begun: float) -> None:
    """Every committed iteration is in a checkpoint, and no process is left."""
    store = CheckpointStore(run / "checkpoints")
    committed = max(int(line["iteration"]) for line in read_lines(run / "metrics.jsonl")) + 1
    assert store.latest()[0].iteration == committed, command.output()[-2000:]
    assert wait_until_gone(run.name) == []
