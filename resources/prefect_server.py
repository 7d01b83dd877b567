"""The embedded Prefect server: one per database and user, on loopback, started by the first run and shared by the next.

A small supervisor process owns the server: it starts it again when it dies, and ends it when the last run that uses
it is gone, however that run went: each holds a lock that the kernel drops with the process. This file only starts
`prefect server`; it imports nothing of Prefect.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

DEFAULT_PORT = 4200
"""Prefect's own; another free one is taken when it is busy."""
STOP_SECONDS = 15.0
"""The server gets this long to write its last rows, then it is killed."""
MAX_RESTARTS = 20
LOG_LINES_SHOWN = 15
TUNING = {
    # One write transaction an event locks SQLite under the subflows' own writes: 2.2 s a subflow, not 0.17 s.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    # Three times smaller database; the event feed stays empty, which only automations would miss.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}


class PrefectServerError(RuntimeError):
    """The server did not start or does not answer: the address, the reason, and the way out."""


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


class PrefectServer:
    """A use of the embedded server at `home`; leaving the block gives it up, and the last user's leaving ends it."""

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        port: int | None = None,
        flush_seconds: float = 2.0,
        start_timeout_seconds: float = 120.0,
    ) -> None:
        """`port`: wanted port; another free one is taken when it is busy, unless it is named here explicitly."""
        self.home = Path(home).expanduser() if home is not None else Path.home() / ".callsheet" / "prefect"
        self._port = port
        self._flush_seconds = flush_seconds
        self._timeout = start_timeout_seconds
        self._use: IO[str] | None = None
        self._pipe: int | None = None
        self._record: ServerRecord | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.joined = False
        """Whether the server was there already."""

    @property
    def record(self) -> ServerRecord:
        if self._record is None:
            raise PrefectServerError("the embedded Prefect server was not started; use it as a context manager")
        return self._record

    @property
    def api_url(self) -> str:
        return self.record.api_url

    @property
    def ui_url(self) -> str:
        return self.record.ui_url

    def __enter__(self) -> "PrefectServer":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Join the server at `home`, or start it.

        Raises PrefectServerError with the end of its log when it does not come up.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + self._timeout
        with _exclusive(self.home / "start.lock", end):
            running = read_record(self.home)
            if running is not None and self._join(running, end):
                return
            self._start_new(end)

    def stop(self, wait_seconds: float = STOP_SECONDS + 5) -> None:
        """Give up this use. If it was the last, wait until the server has written its rows and is gone."""
        if self._use is None:
            return
        self._use.close()
        self._use = None
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        end = time.monotonic() + wait_seconds
        while read_record(self.home) == self._record and not self._has_users() and time.monotonic() < end:
            if self._supervisor is None and not _alive(self.record.supervisor_pid):
                break
            if self._supervisor is not None and self._supervisor.poll() is not None:
                break
            time.sleep(0.05)
        if self._supervisor is not None:
            self._supervisor.poll()
        self._record = None

    def _join(self, running: ServerRecord, end: float) -> bool:
        use = open(self.home / "users.lock", "a")  # noqa: SIM115 - held for as long as the server is used
        if not _try_lock(use, fcntl.LOCK_SH):  # it is ending, since its last user left
            use.close()
            while read_record(self.home) == running and _alive(running.supervisor_pid) and time.monotonic() < end:
                time.sleep(0.1)
            return False
        if not _alive(running.supervisor_pid):
            use.close()
            return False
        if self._port not in (None, running.port):
            use.close()
            raise PrefectServerError(
                f"the database in {self.home} is served on port {running.port} already, not on {self._port};"
                " leave the port out to join it"
            )
        self._use, self._record, self.joined = use, running, True
        wait_until_healthy(running.api_url, end, self._log_tail)
        return True

    def _start_new(self, end: float) -> None:
        self._use = open(self.home / "users.lock", "a")  # noqa: SIM115 - held for as long as the server is used
        fcntl.flock(self._use, fcntl.LOCK_SH)
        port = self._port or free_port(DEFAULT_PORT)
        if self._port is not None and not _is_free(port):
            raise PrefectServerError(
                f"port {port} is busy on 127.0.0.1; free it, or leave the port out and a free one is taken"
            )
        read_end, self._pipe = os.pipe()
        with open(self.home / "server.log", "ab") as log:
            supervisor = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).resolve()),
                    str(read_end),
                    str(self.home),
                    str(port),
                    str(self._flush_seconds),
                ],
                pass_fds=[read_end],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(read_end)
        self._supervisor = supervisor
        self._record = ServerRecord(port=port, supervisor_pid=supervisor.pid)
        (self.home / "server.json").write_text(json.dumps(asdict(self._record)))
        try:
            wait_until_healthy(self._record.api_url, end, self._log_tail, lambda: supervisor.poll() is None)
        except PrefectServerError:
            self.stop()
            raise

    def _has_users(self) -> bool:
        """Whether another run holds the shared lock; the supervisor's exclusive one means that the server is ending."""
        with open(self.home / "users.lock", "a") as lock:
            return not _try_lock(lock, fcntl.LOCK_EX) and _try_lock(lock, fcntl.LOCK_SH)

    def _log_tail(self) -> str:
        log = self.home / "server.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]) if log.exists() else ""


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


def wait_until_healthy(
    api_url: str, end: float, log_tail: Callable[[], str] | None = None, alive: Callable[[], bool] | None = None
) -> None:
    """Wait until the API answers. Raises PrefectServerError at `end` (monotonic), or when `alive` says it is gone."""
    while (reason := is_healthy(api_url)) is not None:
        gone = alive is not None and not alive()
        if gone or time.monotonic() >= end:
            tail = log_tail() if log_tail is not None else ""
            what = "ended while starting" if gone else "does not answer"
            raise PrefectServerError(f"the Prefect server at {api_url} {what} ({reason}). End of its log:\n{tail}")
        time.sleep(0.1)


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else one that the system gives."""
    if _is_free(wanted):
        return wanted
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _exclusive(path: Path, end: float) -> Iterator[None]:
    with open(path, "a") as lock:
        while not _try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() >= end:
                raise PrefectServerError(
                    f"another run still starts the Prefect server ({path} is locked); try again, or end it"
                )
            time.sleep(0.1)
        yield


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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


def supervise(pipe: int, home: Path, port: int, flush_seconds: float) -> None:
    """Keep the server running until nobody uses it; runs in a process of its own."""
    server: subprocess.Popen[bytes] | None = None
    starter_lives, starts = True, 0
    users = open(home / "users.lock", "a")  # noqa: SIM115 - for the life of the process
    try:
        while True:
            if server is None or server.poll() is not None:
                if starts > MAX_RESTARTS:
                    return
                time.sleep(min(5.0, 0.5 * starts))
                server = subprocess.Popen(
                    [sys.executable, "-m", "prefect", "server", "start"],
                    env=server_env(home, port, flush_seconds),
                    stdin=subprocess.DEVNULL,
                )
                starts += 1
            if starter_lives and select.select([pipe], [], [], 0.5)[0]:
                starter_lives = False  # end of file: the run that started us is gone
            if not starter_lives:
                if _try_lock(users, fcntl.LOCK_EX):
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
