"""What ends a run's processes on this machine when its controller is killed and can do nothing itself.

A small process of its own session holds the read end of a pipe from the controller. A byte means an orderly end. The
pipe's end without one means that the controller is gone: then the workers that carry its tag in their environment are
ended, and what the controller's local Ray had started, whose helpers otherwise linger for minutes.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from resources.process_facts import descendants, processes_with_environment, start_ticks

_ORDERLY = b"."
_LIMIT_SECONDS = 20.0
_QUIET_SECONDS = 1.0
_POLL_SECONDS = 0.1
_WATCH_SECONDS = 1.0

Known = dict[int, int]
"""pid -> when it started, so that a later process of the same pid is let alone."""


class Reaper:
    """Held by the controller from entering its cluster to leaving it."""

    def __init__(self, tag_key: str, tag: str, roots: Sequence[int]) -> None:
        """The run's processes: those whose environment sets `tag_key` to `tag`, and the `roots` with their children.

        Ray's helpers overwrite their environment with their title, so they are known by descent only.
        """
        reading, self._writing = os.pipe()
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "resources.reaper", str(reading), tag_key, tag, *(str(root) for root in roots)],
                env=env,
                pass_fds=(reading,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """The run ended in order; nothing is to be done."""
        os.write(self._writing, _ORDERLY)
        os.close(self._writing)
        self._process.wait(timeout=_LIMIT_SECONDS)


def watch(pipe: int, roots: Iterable[int]) -> Known | None:
    """Follow the roots' descendants until the pipe speaks (None) or ends (what is known then)."""
    known: Known = {pid: start_ticks(pid) for pid in roots}
    while not select.select([pipe], [], [], _WATCH_SECONDS)[0]:
        known |= {pid: start_ticks(pid) for pid in descendants(known)}
        known = {pid: started for pid, started in known.items() if start_ticks(pid) == started}
    return None if os.read(pipe, 1) == _ORDERLY else known


def reap(tag_key: str, tag: str, known: Known) -> None:
    """End the known processes and those with the tag, again and again until none has been seen for a second."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    seen_at = time.monotonic()
    while time.monotonic() < min(deadline, seen_at + _QUIET_SECONDS):
        left = {pid for pid, started in known.items() if start_ticks(pid) == started}
        for pid in left | processes_with_environment(tag_key, tag).keys():
            seen_at = time.monotonic()
            _kill(pid)
        time.sleep(_POLL_SECONDS)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # It ended in the meantime.


def main() -> None:
    """Wait for the pipe's word or end."""
    pipe, tag_key, tag = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    known = watch(pipe, [int(root) for root in sys.argv[4:]])
    if known is not None:
        reap(tag_key, tag, known)


if __name__ == "__main__":
    main()
