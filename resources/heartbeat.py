"""The worker's side of supervision: its own log file, a beat a second, and the end when the controller is gone.

Beats travel over a socket of their own, as lines of JSON, so a call never waits for one and one never waits for a call.
"""

import collections
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from resources.failures import LOG_TAIL_LINES

BEAT_SECONDS = 1.0
ORPHAN_SECONDS = 10.0
"""How long a worker looks for a controller that does not answer before it ends itself."""
_TAIL_BYTES = 32 * 1024
_TAIL_EVERY_BEATS = 10
_SOCKET_SECONDS = 5.0


def redirect_output(log_file: Path) -> None:
    """Send stdout, stderr, logging and the fault handler of this process to `log_file`, line by line."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def read_tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a log; empty when there is none."""
    if not log_file.is_file():
        return []
    with log_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return list(collections.deque(text.splitlines(), maxlen=lines))


def end_process_group() -> NoReturn:
    """End this process and, where it leads its own process group, every child with it."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


class Heartbeat:
    """Reports once a second to the controller: that it lives, the running call, new log lines."""

    def __init__(
        self, address: tuple[str, int], hello: Mapping[str, Any], log_file: Path, is_orphan_allowed: bool
    ) -> None:
        """`hello` identifies the rank (token, group, incarnation, rank, pid)."""
        self._address = address
        self._hello = dict(hello)
        self._log_file = log_file
        self._is_orphan_allowed = is_orphan_allowed
        self._log_size = -1
        self._beats = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        self.running: str | None = None
        self.clock_offset = 0.0
        """Controller's monotonic clock minus this process's."""

    def start(self) -> None:
        """Say hello, measure the clock offset, and beat from a thread. Raises OSError when nobody listens."""
        self._connect()
        self._announce_exits()
        threading.Thread(target=self._beat_forever, name="callsheet-heartbeat", daemon=True).start()

    def _connect(self) -> None:
        connection = socket.create_connection(self._address, timeout=_SOCKET_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = time.monotonic()
        connection.sendall(json.dumps(self._hello).encode() + b"\n")
        reply = connection.makefile("rb").readline()
        if not reply:
            raise ConnectionError(f"the controller at {self._address} refused rank {self._hello['rank']}")
        answered = time.monotonic()
        self.clock_offset = float(json.loads(reply)["now"]) - (asked + answered) / 2
        self._socket = connection
        self._log_size = -1

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line. Raises OSError when the controller is not there."""
        with self._lock:
            if self._socket is not None:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def beat(self) -> dict[str, Any]:
        """The state of this process: the running call, and the log's tail if it grew."""
        message: dict[str, Any] = {"running": self.running}
        size = self._log_file.stat().st_size if self._log_file.exists() else 0
        self._beats += 1
        if size != self._log_size or self._beats % _TAIL_EVERY_BEATS == 0:
            self._log_size = size
            message["tail"] = read_tail(self._log_file)
        return message

    def _beat_forever(self) -> None:
        while True:
            try:
                self.send(self.beat())
                is_over = self._wait_for_end()
            except OSError:
                is_over = True
            if is_over:
                self._find_controller()

    def _wait_for_end(self) -> bool:
        """Wait a beat; True as soon as the controller closes the connection, which it never does while it lives."""
        if self._socket is None:
            time.sleep(BEAT_SECONDS)
            return False
        readable, _, _ = select.select([self._socket], [], [], BEAT_SECONDS)
        return bool(readable) and not self._socket.recv(1)

    def _find_controller(self) -> None:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            try:
                return self._connect()
            except OSError as error:
                # A refused connection is certain: the host answers and the controller is gone.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= deadline:
                    if not self._is_orphan_allowed:
                        end_process_group()
                    return self._stop_sending()
                time.sleep(BEAT_SECONDS)

    def _stop_sending(self) -> None:
        with self._lock:
            self._socket = None

    def _announce_exits(self) -> None:
        """Let `os._exit` and SIGTERM leave a word, since Ray reports every death alike."""
        os._exit = self._exiting(os._exit)  # type: ignore[assignment]
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._terminating(previous))

    def _exiting(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        def announce_and_leave(status: int) -> NoReturn:
            self._last_word({"exit": status})
            leave(status)

        return announce_and_leave

    def _terminating(self, previous: Any) -> Callable[[int, FrameType | None], None]:
        def announce_and_terminate(number: int, frame: FrameType | None) -> None:
            self._last_word({"signal": signal.Signals(number).name})
            if callable(previous):
                previous(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        return announce_and_terminate

    def _last_word(self, message: dict[str, Any]) -> None:
        # The lock may be held by the very thread that is interrupted here, so it is not taken.
        # A forked child inherits the socket; only the worker itself may speak on it.
        if self._socket is not None and os.getpid() == self._pid:
            try:
                self._socket.sendall(json.dumps({**message, "tail": read_tail(self._log_file)}).encode() + b"\n")
            except OSError:
                logging.getLogger(__name__).warning("the controller did not hear the last word %s", message)
