"""A server whose database is locked for a moment is asked again soon, and an idle connection is dropped in time."""

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from benchmarks import controller_tax, growth
from tasks.api import IDLE_SECONDS, hint_retry, hooked_clients, quick_retries


def test_each_refusal_of_a_request_is_followed_by_a_longer_pause():
    """Of one request; Prefect's client sends it again after what the header says."""
    request = httpx.Request("POST", "http://127.0.0.1/api/flow_runs")
    refusals = [httpx.Response(503, request=request) for _ in range(3)]
    for refusal in refusals:
        hint_retry(refusal)
    assert [refusal.headers["Retry-After"] for refusal in refusals] == ["0.05", "0.2", "0.8"]


def test_a_server_that_names_its_own_pause_is_left_to_it():
    request = httpx.Request("POST", "http://127.0.0.1/api/flow_runs")
    refusal = httpx.Response(503, headers={"Retry-After": "9"}, request=request)
    hint_retry(refusal)
    assert refusal.headers["Retry-After"] == "9"


def test_an_answer_gets_no_pause():
    answer = httpx.Response(200, request=httpx.Request("GET", "http://127.0.0.1/api/health"))
    hint_retry(answer)
    assert "Retry-After" not in answer.headers


def test_clients_of_both_kinds_that_flows_make_are_told_when_to_ask_again():
    async def is_hooked() -> bool:
        return bool(get_client()._client.event_hooks["response"])

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), hooked_clients():
        assert hint_retry in get_client(sync_client=True)._client.event_hooks["response"]
        assert asyncio.run(is_hooked())
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert not asyncio.run(is_hooked())


def test_inside_a_flow_the_client_it_was_begun_with_is_not_used_on(prefect_session: None):
    """The flow's own client was made before the block, without the hook; Prefect would hand it out again."""

    @flow
    def run() -> tuple[bool, bool]:
        begun_with = get_client(sync_client=True)
        with quick_retries():
            used = get_client(sync_client=True)
        return used is not begun_with, hint_retry in used._client.event_hooks["response"]

    assert run() == (True, True)


def test_a_connection_is_given_up_before_a_server_closes_it():
    """One that the server closes while a request is on its way costs Prefect's client two seconds."""
    accepted: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return
            threading.Thread(target=answer, args=(accepted[-1],), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ntrue")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), hooked_clients():
            client = get_client(sync_client=True)._client
            for pause in (0.0, IDLE_SECONDS + 0.2):
                client.get("/health")
                time.sleep(pause)
            client.get("/health")
            client.close()
        listener.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()
    assert len(accepted) == 2  # the first two requests share a connection; the third comes too late for it


@pytest.mark.parametrize(
    ("module", "arguments", "gives"),
    [
        (growth, (2, SimpleNamespace(drop=lambda batch_id: None), lambda number: None), None),
        (controller_tax, (2,), (0, None)),
    ],
)
def test_no_op_iterations_ask_a_busy_server_again_as_soon_as_those_of_a_run(
    module: Any, arguments: tuple[Any, ...], gives: Any, monkeypatch: pytest.MonkeyPatch, prefect_session: None
):
    asked: list[bool] = []

    def iterate(*_: Any, **__: Any) -> Any:
        asked.append(hint_retry in get_client(sync_client=True)._client.event_hooks["response"])
        return gives

    monkeypatch.setattr(module, "call_iteration", iterate)
    module.many_iterations.fn(*arguments)
    assert asked == [True, True]
