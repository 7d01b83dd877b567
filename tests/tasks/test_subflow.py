"""What the subflow of an iteration does about an API that answers its health check and refuses the call."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prefect
import pytest
from prefect import flow
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from tasks.api import ApiUnreachableError
from tasks.subflow import call_subflow

BODIES: list[str] = []


@flow(persist_result=False)
def iteration() -> None:
    BODIES.append("ran")


class Refusing(BaseHTTPRequestHandler):
    """Tells its version and that it is healthy; what would make anything gets the status of its server."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps(prefect.__version__))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(self.server.status, "{}")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def refusing(status: int) -> Iterator[None]:
    """Flows inside the block ask an API that answers so."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    server.daemon_threads = True
    server.status = status
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    settings = {
        PREFECT_API_URL: f"http://127.0.0.1:{server.server_address[1]}/api",
        PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
    }
    try:
        with temporary_settings(settings):
            yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422])
def test_a_call_that_the_api_refuses_for_good_ends_the_run_with_its_answer(status: int):
    with refusing(status), pytest.raises(PrefectHTTPStatusError, match=str(status)):
        call_subflow(iteration, iteration=0, attempt=1, outage_seconds=600.0)
    assert BODIES == []


def test_an_api_that_is_healthy_and_takes_no_call_is_given_up_after_the_outage_allowed():
    with refusing(500), pytest.raises(ApiUnreachableError, match=r"no call of iteration 4 for 0.5 s, though .*healthy"):
        call_subflow(iteration, iteration=4, attempt=1, outage_seconds=0.5)
    assert BODIES == []
