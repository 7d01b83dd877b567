"""A server whose database is locked for a moment is asked again soon."""

import httpx
from prefect.context import SyncClientContext

from tasks.api import quick_retries


def test_each_refusal_of_a_request_is_followed_by_a_longer_pause(monkeypatch):
    """Three times 503, then an answer: 0.05, 0.2 and 0.8 s between them, where Prefect would sleep 2, 4 and 8 s."""
    answers = iter([503, 503, 503, 200])
    asked: list[int] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(next(answers))
        return httpx.Response(asked[-1], json=[])

    monkeypatch.setattr("prefect.client.base.bounded_poisson_interval", lambda low, high: low)
    slept: list[float] = []
    monkeypatch.setattr("prefect.client.base.time.sleep", slept.append)
    with quick_retries():
        context = SyncClientContext.get()
        assert context is not None
        client = context.client._client
        client._transport = httpx.MockTransport(serve)
        client._mounts = {}
        assert client.get("http://127.0.0.1/api/health").status_code == 200
    assert asked == [503, 503, 503, 200]
    assert slept == [0.05, 0.2, 0.8]
