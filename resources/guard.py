"""Child processes that cannot outlive the controller.

The child runs under a small guard (`python -m resources.guard`) that leads a process group of its own and holds the
read end of a pipe. When the write end closes, however its holder ended, the guard ends the whole group.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.2


class GuardedProcess:
    """A child that ends with its parent."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, log_file: Path | None = None
    ) -> None:
        """Start `command`; its output goes to `log_file`, or is inherited. `env` is the whole environment."""
        reading, self._writing = os.pipe()
        output: IO[bytes] | None = log_file.open("ab") if log_file is not None else None
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "resources.guard", str(reading), *command],
                env=dict(os.environ if env is None else env) | {"PYTHONPATH": _python_path(env)},
                pass_fds=(reading,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
            )
        finally:
            os.close(reading)
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        """Of the guard, which is also the id of the process group."""
        return self._guard.pid

    def poll(self) -> int | None:
        """The child's exit code, or None while it runs."""
        return self._guard.poll()

    def stop(self) -> None:
        """End the child and everything it started; returns when it is gone."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._guard.wait(timeout=2 * _GRACE_SECONDS + 5.0)


def _python_path(env: Mapping[str, str] | None) -> str:
    here = str(Path(__file__).resolve().parent.parent)
    given = (os.environ if env is None else env).get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (here, given) if part)


def main() -> int:
    """Run the command after the pipe's number until it ends or the pipe does."""
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    child = subprocess.Popen(sys.argv[2:])
    while child.poll() is None:
        if select.select([pipe], [], [], _POLL_SECONDS)[0]:
            _end_group(child)
    # Grandchildren go too; the guard leads the group, so this is its own end as well.
    code = child.returncode
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if child.poll() is None:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
