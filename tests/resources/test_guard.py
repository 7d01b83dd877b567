"""A guarded child ends with whoever holds its pipe."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resources.guard import GuardedProcess
from resources.process_facts import is_running

ROOT = Path(__file__).resolve().parents[2]
GRANDCHILD = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def wait_until(is_true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


def first_pid(log: Path) -> int:
    assert wait_until(lambda: log.is_file() and log.read_text().strip() != "")
    return int(log.read_text().split()[0])


def test_stopping_a_guarded_child_ends_its_grandchildren(tmp_path: Path) -> None:
    child = GuardedProcess([sys.executable, "-c", GRANDCHILD], log_file=tmp_path / "log")
    grandchild = first_pid(tmp_path / "log")
    assert child.poll() is None
    child.stop()
    assert wait_until(lambda: not is_running(grandchild))
    assert not is_running(child.pid)


def test_a_guarded_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from resources.guard import GuardedProcess\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"child = GuardedProcess([sys.executable, '-c', {GRANDCHILD!r}], log_file=log)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    grandchild = first_pid(tmp_path / "log")
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=10)
    assert wait_until(lambda: not is_running(grandchild))


def test_the_exit_code_of_a_guarded_child_is_passed_on(tmp_path: Path) -> None:
    child = GuardedProcess([sys.executable, "-c", "raise SystemExit(7)"], log_file=tmp_path / "log")
    assert wait_until(lambda: child.poll() is not None)
    assert child.poll() == 7
    child.stop()
