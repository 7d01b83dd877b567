"""How workers and other callers speak with the supervisor: lines of JSON, the first of which shows the run's secret."""

import hmac
import json
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from resources.failures import Failure, GroupFacts

_LINE_LIMIT = 1 << 20
_log = logging.getLogger(__name__)


class Link:
    """One connection and what has been read of its next line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.hello: dict[str, Any] | None = None
        self.opened_at = time.monotonic()
        self._buffer = b""

    def lines(self) -> Sequence[bytes] | None:
        """Complete lines that have arrived; None when the other side is gone or speaks another language."""
        try:
            received = self.socket.recv(1 << 16)
        except OSError:
            return None
        self._buffer += received
        if (
            not received
            or len(self._buffer) > _LINE_LIMIT
            or (self.hello is None and not b"{".startswith(self._buffer[:1]))
        ):
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def reply(self, message: dict[str, Any]) -> bool:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


def ask_supervisor(facts: GroupFacts, report: Failure | None, timeout: float = 3.0) -> Failure | None:
    """From another process: report a failure (or none) and get the one that is kept. None when nobody answers."""
    message = {
        "token": facts.token,
        "group": facts.name,
        "incarnation": facts.incarnation,
        "report": None if report is None else report.to_json(),
    }
    try:
        with socket.create_connection(facts.supervisor, timeout=timeout) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            reply = connection.makefile("rb").readline()
    except OSError as error:
        _log.warning("the controller at %s did not answer: %s", facts.supervisor, error)
        return report
    kept = json.loads(reply)["failure"] if reply else None
    return report if kept is None else Failure.from_json(kept)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for what is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def shows(message: dict[str, Any], token: str) -> bool:
    """Whether a message holds the secret, compared in a time that does not tell how much of it was right."""
    shown = message.get("token")
    # A lone surrogate, which JSON can spell, is no text in UTF-8.
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(errors="surrogatepass"), token.encode())
