"""Keeps the embedded Prefect server running while anybody uses it; runs in a process of its own, on its own.

Only the standard library: this file is executed by path. It starts `prefect server` again when it dies, and ends it
when no run holds the lock on `users.lock` any more; the kernel drops such a lock with its process.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STOP_SECONDS = 15.0
"""The server gets this long to write its last rows, then it is killed."""
MAX_RESTARTS = 20
PR_SET_PDEATHSIG = 1
TUNING = {
    # One write transaction an event locks SQLite under the subflows' own writes: 2.2 s a subflow, not 0.17 s.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    # Three times smaller database; the event feed stays empty, which only automations would miss.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # Longer than Prefect's clients keep a connection (25 s): at 5 s, its default, one that is used again just as it is
    # closed costs its request two seconds.
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "30",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """What `server.json` says of the running server."""

    port: int
    supervisor_pid: int

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def read_record(home: Path) -> ServerRecord | None:
    """What the last start wrote; the server it names may be gone."""
    try:
        return ServerRecord(**json.loads((home / "server.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def is_healthy(api_url: str, timeout: float = 2.0) -> str | None:
    """None when the API at `api_url` answers, else why not."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=timeout) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def home_served_at(api_url: str) -> Path | None:
    """Home folder of the Prefect server at this address; None when none answers."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/admin/settings", timeout=2.0) as answer:
            return Path(json.load(answer)["home"])
    except (OSError, ValueError, KeyError):
        return None


def try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def process_lives(pid: int) -> bool:
    """Whether the process runs; one that ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def server_env(home: Path, port: int, flush_seconds: float) -> dict[str, str]:
    """Environment of the server process: its database, its address, and settings under which SQLite keeps up."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env |= TUNING | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": str(flush_seconds),
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
    }
    return env | {key: value for key, value in os.environ.items() if key.startswith("PREFECT_SERVER_SERVICES_")}


def _end_with_parent() -> None:
    """Linux: a killed supervisor takes the server with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(pipe: int, home: Path, port: int, flush_seconds: float) -> None:
    """Keep the server running until nobody uses it; runs in a process of its own."""
    server: subprocess.Popen[bytes] | None = None
    starter_lives, was_healthy, starts = True, False, 0
    api_url = ServerRecord(port=port, supervisor_pid=os.getpid()).api_url
    users = open(home / "users.lock", "a")  # noqa: SIM115 - for the life of the process
    try:
        while True:
            if server is None or server.poll() is not None:
                if starts > (MAX_RESTARTS if was_healthy else 0):
                    return  # it never came up, or dies again and again: its log says why
                time.sleep(min(5.0, 0.5 * starts))
                server = subprocess.Popen(
                    [sys.executable, "-P", "-m", "prefect", "server", "start"],
                    env=server_env(home, port, flush_seconds),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=_end_with_parent,
                )
                starts += 1
            was_healthy = was_healthy or home_served_at(api_url) == home  # another server may answer there
            if starter_lives and select.select([pipe], [], [], 0.5)[0]:
                starter_lives = False  # end of file: the run that started us is gone
            if not starter_lives:
                if try_lock(users, fcntl.LOCK_EX):
                    return  # nobody uses it, and nobody can join while this lock is held
                time.sleep(0.2)
    finally:
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
        (home / "server.json").unlink(missing_ok=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the run's terminal is the run's affair
    supervise(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
