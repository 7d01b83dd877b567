"""A soak: a run of many iterations with a random fault about every minute, and the controller killed now and then.

    python -m tests.chaos.soak [--minutes 30] [--every 60] [--seed N]

Bounded: after the minutes the run is told to end, its last iteration is saved, and an undisturbed run of as many
iterations is made, which takes less than the minutes. Both have to have the same bits.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from configs.environment import apply_defaults
from resources.process_facts import descendants
from tests.chaos.commands import Command, processes_of, resume, train, wait_for_iterations, wait_until_gone
from tests.chaos.runs import assert_same_run, events_of, metrics_of, tiny_config

EVERY_SECONDS = 60.0
CONTROLLER_SHARE = 0.25
MOST_ITERATIONS = 1_000_000
"""More than any soak lasts for."""


def main() -> int:
    """0 when no iteration was lost or doubled and every bit is the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    given = parser.parse_args()
    apply_defaults()
    print(f"soak: {given.minutes:g} minutes, seed {given.seed} (make soak SEED={given.seed})", flush=True)
    with tempfile.TemporaryDirectory() as name:
        return soak(Path(name), given.minutes, given.every, random.Random(given.seed))


def soak(folder: Path, minutes: float, every: float, chosen: random.Random) -> int:
    """Disturb, end, compare."""
    home = str(folder / "prefect")
    config = tiny_config(
        folder,
        "soak",
        iterations=MOST_ITERATIONS,
        prefect={"home": home},
        checkpoint={"every": 2},
        recovery={"max_recoveries": 1000},
    )
    run, counts = folder / "soak", {"controller": 0, "process": 0}
    begun = time.monotonic()
    end = begun + 60.0 * minutes
    command = train(config, folder)
    wait_for_iterations(command, run, 1)
    while time.monotonic() < end and command.process.poll() is None:
        time.sleep(min(chosen.uniform(0.5, 1.5) * every, max(0.0, end - time.monotonic())))
        if command.process.poll() is not None:
            break
        if chosen.random() < CONTROLLER_SHARE:
            counts["controller"] += 1
            what = "controller SIGKILL"
            command = _kill_controller(command, run, folder)
        elif what := _kill_some_process(command, chosen):
            counts["process"] += 1
        print(f"{time.monotonic() - begun:6.0f} s, {len(metrics_of(run))} iterations: {what or 'nothing'}", flush=True)
    is_running = command.process.poll() is None
    command.send(signal.SIGTERM)
    command.wait()
    done = len(metrics_of(run))
    undisturbed = config.model_copy(update={"name": "undisturbed", "iterations": done})
    other = train(undisturbed, folder).wait(3600.0) if is_running and done else 1
    print(json.dumps({"undisturbed": other, **counts, "recovered": len(events_of(run, "recovered"))}))
    if other:
        print(command.output()[-3000:])
        return 1
    assert_same_run(run, folder / "undisturbed")
    left = wait_until_gone("soak")
    print(f"{done} iterations, none lost or doubled, all bits equal; processes left: {len(left)}")
    return 1 if left else 0


def _kill_controller(command: Command, run: Path, folder: Path) -> Command:
    command.send(signal.SIGKILL)
    command.wait()
    wait_until_gone(run.name)
    again = resume(run, folder)
    wait_for_iterations(again, run, len(metrics_of(run)) + 1)
    return again


def _kill_some_process(command: Command, chosen: random.Random) -> str:
    """A worker, a task host, a snapshot writer: whatever of the run Ray started. Says what was done."""
    mine = descendants([command.process.pid]) & set(processes_of("soak"))
    names = {pid: _title(pid) for pid in sorted(mine)}
    able = [pid for pid, name in names.items() if name.startswith("ray::") and "IDLE" not in name]
    if not able:
        return ""
    pid, number = chosen.choice(able), chosen.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    os.kill(pid, number)
    return f"{names[pid].strip()} {number.name}"


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has just ended


if __name__ == "__main__":
    sys.exit(main())
