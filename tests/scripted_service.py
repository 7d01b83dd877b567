"""An HTTP service that answers as a test says: a judge, or a reward service."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, str, dict[str, str]]
"""Status, body, headers."""
Script = Callable[[dict[str, Any], int], Answer | None]
"""Body of a request, and the number of the attempt with it, from 1 -> the answer; None is silence."""


class ScriptedService(ThreadingHTTPServer):
    """Answers by a script, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedService

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(self.headers.get("Authorization", ""))
            attempt = self.server.bodies.count(body)
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
        answer = self.server.script(body, attempt)
        if answer is None:
            self.server.is_over.wait(60)
        with self.server.lock:
            self.server.active -= 1
        if answer is not None:
            status, text, headers = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Quiet."""


Serve = Callable[[Script], ScriptedService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a service with a script; all of them end with the test."""
    services: list[ScriptedService] = []

    def start(script: Script) -> ScriptedService:
        services.append(ScriptedService(script))
        threading.Thread(target=services[-1].serve_forever, args=(0.05,), daemon=True).start()
        return services[-1]

    yield start
    for service in services:
        service.is_over.set()
        service.shutdown()
        service.server_close()


def said(text: str) -> Answer:
    """What a judge answers in OpenAI's form."""
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}), {}
