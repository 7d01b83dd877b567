"""`callsheet train` and `resume` in processes of their own, to be killed from outside."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from configs.load import dump_config
from configs.run import RunConfig
from resources.cleanup import RUN_KEY
from resources.process_facts import processes_with_environment
from resources.run_directory import read_lines
from tests.interrupts import heed_interrupts

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from flows.cli import main; sys.exit(main())"
START_SECONDS = 300.0
GONE_SECONDS = 60.0
POLL_SECONDS = 0.01


class Command:
    """A running `callsheet ...`; what it prints goes to a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments],
                cwd=log.parent,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_interrupts,
            )

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Its exit code."""
        return self.process.wait(timeout=seconds)

    def send(self, number: signal.Signals) -> None:
        """A signal to the controller alone."""
        self.process.send_signal(number)

    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")


def train(config: RunConfig, folder: Path) -> Command:
    """Start the run."""
    path = folder / f"{config.name}.yaml"
    path.write_text(yaml.safe_dump(dump_config(config)))
    return Command(["train", str(path)], folder / f"{config.name}.log")


def resume(run: Path, folder: Path) -> Command:
    """Go on with it."""
    return Command(["resume", str(run)], folder / f"{run.name}.log")


def wait_for_iterations(command: Command, run: Path, count: int, seconds: float = START_SECONDS) -> bool:
    """Wait until so many iterations are committed; False when the command ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and command.process.poll() is None:
        if sum(1 for _ in read_lines(run / "metrics.jsonl")) >= count:
            return True
        time.sleep(POLL_SECONDS)
    if command.process.poll() is None:
        raise TimeoutError(f"no {count} iterations after {seconds} s:\n{command.output()[-2000:]}")
    return False


def wait_for_save(command: Command, run: Path, seconds: float = START_SECONDS) -> bool:
    """Wait until a checkpoint is being written; False when the command ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and command.process.poll() is None:
        if list((run / "checkpoints").glob(".writing-*")):
            return True
        time.sleep(POLL_SECONDS / 5)
    return False


def kill_at_a_point(command: Command, run: Path, chosen: random.Random) -> str:
    """SIGKILL the controller at a point that `chosen` draws; returns which."""
    done = sum(1 for _ in read_lines(run / "metrics.jsonl"))
    point = chosen.choice(["start", "iteration", "iteration", "iteration", "save"])
    if point == "start":
        time.sleep(chosen.uniform(0.0, 20.0))
    elif point == "save":
        wait_for_save(command, run)
        time.sleep(chosen.uniform(0.0, 0.05))
    else:
        wait_for_iterations(command, run, done + chosen.randint(1, 2))
        time.sleep(chosen.uniform(0.0, 1.0))
    command.send(signal.SIGKILL)
    command.wait()
    return point


def processes_of(run_id: str) -> list[int]:
    """Processes of a run on this machine."""
    return [pid for pid, owner in processes_with_environment(RUN_KEY).items() if owner == run_id]


def wait_until_gone(run_id: str) -> list[int]:
    """What is left of a run's processes after they had a while to end."""
    end = time.monotonic() + GONE_SECONDS
    while processes_of(run_id) and time.monotonic() < end:
        time.sleep(0.2)
    return processes_of(run_id)
