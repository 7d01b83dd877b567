"""The embedded Prefect server: one per database and user, on loopback, started by the first run and shared by the next.

A small supervisor process owns the server: it starts it again when it dies, and ends it when the last run that uses
it is gone, however that run went: each holds a lock that the kernel drops with the process. This file only starts
`prefect server`; it imports nothing of Prefect.
"""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

from resources.prefect_supervisor import (
    STOP_SECONDS,
    ServerRecord,
    home_served_at,
    process_lives,
    read_record,
    try_lock,
)

DEFAULT_PORT = 4200
"""Prefect's own; another free one is taken when it is busy."""
LOG_LINES_SHOWN = 15
_LEFT_TO_OTHERS: list[subprocess.Popen[bytes]] = []
"""Supervisors this process started that serve other runs now; they are not ours to wait for."""


class PrefectServerError(RuntimeError):
    """The server did not start or does not answer: the address, the reason, and the way out."""


class PortTakenError(PrefectServerError):
    """Another server answers on the port that was to be ours."""


class PrefectServer:
    """A use of the embedded server at `home`; leaving the block gives it up, and the last user's leaving ends it."""

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        port: int | None = None,
        flush_seconds: int = 2,
        start_timeout_seconds: float = 120.0,
    ) -> None:
        """`port`: wanted port; another free one is taken when it is busy, unless it is named here explicitly."""
        self.home = (Path(home).expanduser() if home is not None else Path.home() / ".callsheet" / "prefect").resolve()
        self._port = port
        if flush_seconds < 1:
            raise ValueError(
                f"flush_seconds is {flush_seconds}; Prefect cuts it to whole seconds; at 0 its server spins"
            )
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

        Raises PrefectServerError: with the end of its log when it does not come up, and for a home that cannot be
        written.
        """
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._join_or_start()
        except OSError as error:
            where = error.filename or self.home
            raise PrefectServerError(
                f"the Prefect server's home {self.home} cannot be used: {error.strerror or error}: {where}; "
                "choose another folder (--set prefect.home=...)"
            ) from error

    def _join_or_start(self) -> None:
        end = time.monotonic() + self._timeout
        with _exclusive(self.home / "start.lock", end):
            running = read_record(self.home)
            if running is not None and self._join(running, end):
                return
            try:
                self._start_new(end, DEFAULT_PORT)
            except PortTakenError:  # somebody was faster; a port that the system gives is nobody's favourite
                self._start_new(end, 0)

    def revive(self) -> bool:
        """Start the server again at its own address if its supervisor was killed, which takes the server along.

        True when that was done. While the port is not free yet nothing is done; ask again.
        """
        record = self._record
        if record is None or process_lives(record.supervisor_pid):
            return False
        with _exclusive(self.home / "start.lock", time.monotonic() + self._timeout):
            running = read_record(self.home)
            if running is not None and running.port == record.port and process_lives(running.supervisor_pid):
                self._record = running  # another run that uses it was faster
                return True
            if not _is_free(record.port):
                return False
            if self._supervisor is not None:
                self._supervisor.wait()  # it is dead, and only its parent can take it off the table of processes
            self._launch(record.port)
            return True

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
            if self._supervisor is None and not process_lives(self.record.supervisor_pid):
                break
            if self._supervisor is not None and self._supervisor.poll() is not None:
                break
            time.sleep(0.05)
        if self._supervisor is not None and self._supervisor.poll() is None:
            _LEFT_TO_OTHERS.append(self._supervisor)
        self._record = self._supervisor = None

    def _join(self, running: ServerRecord, end: float) -> bool:
        use = open(self.home / "users.lock", "a")  # noqa: SIM115 - held for as long as the server is used
        if not try_lock(use, fcntl.LOCK_SH):  # it is ending, since its last user left
            use.close()
            while (
                read_record(self.home) == running and process_lives(running.supervisor_pid) and time.monotonic() < end
            ):
                time.sleep(0.1)
            return False
        if not process_lives(running.supervisor_pid) or home_served_at(running.api_url) not in (None, self.home):
            use.close()
            return False
        if self._port not in (None, running.port):
            use.close()
            raise PrefectServerError(
                f"the database in {self.home} is served on port {running.port} already, not on {self._port};"
                " leave the port out to join it"
            )
        self._use, self._record, self.joined = use, running, True
        self._wait_until_ours(running, end)
        return True

    def _start_new(self, end: float, wanted: int) -> None:
        port = self._port or free_port(wanted)
        if self._port is not None and not _is_free(port):
            raise PrefectServerError(
                f"port {port} is busy on 127.0.0.1; free it, or leave the port out and a free one is taken"
            )
        self._use = open(self.home / "users.lock", "a")  # noqa: SIM115 - held for as long as the server is used
        fcntl.flock(self._use, fcntl.LOCK_SH)
        supervisor = self._launch(port)
        try:
            self._wait_until_ours(self.record, end, supervisor)
        except PrefectServerError:
            self.stop()
            raise

    def _launch(self, port: int) -> "subprocess.Popen[bytes]":
        """Start a supervisor, and write down that it is the one."""
        if self._pipe is not None:
            os.close(self._pipe)
        read_end, self._pipe = os.pipe()
        with open(self.home / "server.log", "ab") as log:
            supervisor = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    str(Path(__file__).with_name("prefect_supervisor.py").resolve()),
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
        return supervisor

    def _wait_until_ours(
        self, record: ServerRecord, end: float, supervisor: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        """Wait until the server of this database answers; the port may have become another server's."""
        while (served := home_served_at(record.api_url)) != self.home:
            gone = supervisor is not None and supervisor.poll() is not None
            if served is not None or (gone and not _is_free(record.port)):
                owner = served or "another run"
                raise PortTakenError(
                    f"port {record.port} is served by the Prefect server of {owner}, not of {self.home}"
                )
            if gone or time.monotonic() >= end:
                what = "ended while starting" if gone else "does not answer"
                raise PrefectServerError(
                    f"the Prefect server at {record.api_url} {what}. End of its log:\n{self._log_tail()}"
                )
            time.sleep(0.1)

    def _has_users(self) -> bool:
        """Whether another run holds the shared lock; the supervisor's exclusive one means that the server is ending."""
        with open(self.home / "users.lock", "a") as lock:
            return not try_lock(lock, fcntl.LOCK_EX) and try_lock(lock, fcntl.LOCK_SH)

    def _log_tail(self) -> str:
        log = self.home / "server.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]) if log.exists() else ""


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else (and for 0) one that the system gives."""
    if wanted and _is_free(wanted):
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
        while not try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() >= end:
                raise PrefectServerError(
                    f"another run still starts the Prefect server ({path} is locked); try again, or end it"
                )
            time.sleep(0.1)
        yield
