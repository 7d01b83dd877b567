"""A server whose database is locked for a moment is asked again soon."""

import asyncio

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.api import hint_retry, hooked_clients


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
