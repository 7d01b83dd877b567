"""Judges and reward services over HTTP: 429, 500, nonsense and silence cost retries, never another row's score."""

import asyncio
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from resources import rate_limits
from resources.grader_backends import build_backends
from resources.graders import FinishedRow, Grader, Sample, Secret, read_sample
from resources.judge import HttpSettings, JudgeSettings, read_number
from resources.rate_limits import RateLimit
from resources.reward_loop import RewardLoop
from tests.scripted_service import Answer, Serve, said

KEY = "sk-very-secret"


def asked(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def sample(row_id: int, response: str) -> Sample:
    extra = {"weight": math.nan, "range": [0.0, math.inf], "note": "a\ud800"}
    record = json.dumps({"prompt": "Is it?", "answer": "yes", "source": "s", "extra": extra}).encode()
    return read_sample(FinishedRow(row_id=row_id, group_id=row_id, record=record, response_ids=(1,)), response)


def judge(url: str, **more: Any) -> JudgeSettings:
    fields: dict[str, Any] = {"base_url": url, "model": "m", "prompt": "{response}", "first_pause_seconds": 0.01}
    return JudgeSettings(**{**fields, **more})


def grade(settings: Any, responses: list[str], **grader: Any) -> list[float | str]:
    """Scores, or the text of the failure."""
    kind = "judge" if isinstance(settings, JudgeSettings) else "http"
    one = Grader(**{"name": "j", "kind": kind, "backend": settings, "timeout_seconds": 10.0, **grader})
    loop = RewardLoop([one], 1, build_backends([one], 1))
    try:
        found = loop.finish("b", [sample(row, text) for row, text in enumerate(responses)], 120.0).grades
    finally:
        loop.close()
    return [
        grade.score if grade.cause is None else grade.text
        for grade in (found[row]["j"] for row in range(len(responses)))
    ]


def test_the_judge_is_asked_once_a_response_with_key_and_prompt(serve: Serve):
    service = serve(lambda body, attempt: said("0.75"))
    prompt = "Q: {prompt} A: {answer} R: {response}"
    assert grade(judge(service.url, prompt=prompt, key=Secret(KEY)), ["it is {answer}"]) == [0.75]
    assert [asked(body) for body in service.bodies] == ["Q: Is it? A: yes R: it is {answer}"]
    assert service.keys == {f"Bearer {KEY}"}


def test_refusals_errors_and_nonsense_are_tried_again(serve: Serve):
    replies = {
        "busy": (429, "slow down", {"Retry-After": "0"}),
        "broken": (500, "", {}),
        "html": (200, "<html>", {}),
        "chatty": said("I cannot say"),
        "high": said("95"),
    }

    def script(body: dict[str, Any], attempt: int) -> Answer:
        return replies[asked(body)] if attempt <= 2 else said("0.5")

    service = serve(script)
    assert grade(judge(service.url), list(replies)) == [0.5] * 5
    assert len(service.bodies) == 15


def test_one_broken_and_one_silent_answer_leave_the_others_their_scores(serve: Serve):
    def script(body: dict[str, Any], attempt: int) -> Answer | None:
        return {"raise": (500, "", {}), "never": None}.get(asked(body), said("1"))

    service = serve(script)
    found = grade(judge(service.url, max_retries=1), ["a", "b", "raise", "never"], timeout_seconds=1.0)
    assert found[:2] == [1.0, 1.0]
    assert found[2] == f"grader 'j', error: {service.url}/chat/completions answered 500"
    assert found[3] == f"grader 'j', timeout: {service.url}/chat/completions did not answer within 1 s"


def test_a_refused_key_is_not_tried_again_and_not_told(serve: Serve):
    service = serve(lambda body, attempt: (401, "bad key", {}))
    [text] = grade(judge(service.url, key=Secret(KEY)), ["a"])
    assert "answered 401" in str(text)
    assert KEY not in str(text)
    assert len(service.bodies) == 1


def test_no_more_requests_than_allowed_are_under_way(serve: Serve):
    def script(body: dict[str, Any], attempt: int) -> Answer:
        time.sleep(0.05)
        return said("1")

    service = serve(script)
    assert grade(judge(service.url, max_concurrency=3), [str(n) for n in range(12)]) == [1.0] * 12
    assert service.most_active == 3


@pytest.mark.parametrize(("limit", "workers", "shares"), [(5, 2, [3, 2]), (4, 4, [1, 1, 1, 1]), (7, 3, [3, 2, 2])])
@pytest.mark.parametrize("kind", ["judge", "http"])
def test_workers_share_the_requests_at_a_time_to_the_last_one(kind: str, limit: int, workers: int, shares: list[int]):
    settings = judge("http://h", max_concurrency=limit) if kind == "judge" else HttpSettings(url="http://h")
    one = Grader(name="g", kind=kind, backend=replace(settings, max_concurrency=limit))
    assert [build_backends([one], 1, rank, workers)["g"].workers for rank in range(workers)] == shares


@pytest.mark.parametrize("rank", [0, 3])
def test_a_limit_that_leaves_a_worker_no_request_is_refused(rank: int):
    one = Grader(name="g", kind="http", backend=HttpSettings(url="http://h", max_concurrency=3))
    with pytest.raises(ValueError, match="max_concurrency is 3 and there are 4 reward workers"):
        build_backends([one], 1, rank, 4)


def test_each_worker_has_a_judge_that_it_serves_itself_alone():
    one = Grader(name="g", kind="judge", backend=judge("", max_concurrency=3))
    assert build_backends([one], 1, 3, 4)["g"].workers == 3


def test_an_unreachable_judge_is_an_error_with_its_address():
    [text] = grade(judge("http://user:pass@127.0.0.1:9/v1", max_retries=1), ["a"])
    assert text == "grader 'j', error: http://127.0.0.1:9/v1/chat/completions cannot be asked: ConnectError"


def test_an_endless_answer_is_cut_off(serve: Serve):
    service = serve(lambda body, attempt: (200, "x" * (1 << 22), {}))
    [text] = grade(judge(service.url, max_retries=0), ["a"])
    assert "nonsense" in str(text)


def test_a_reward_service_gets_the_sample_and_gives_a_number(serve: Serve):
    service = serve(lambda body, attempt: (200, json.dumps({"score": len(body["response"])}), {}))
    assert grade(HttpSettings(url=service.url), ["four", "fives"]) == [4.0, 5.0]
    assert service.bodies[0]["prompt"] == "Is it?"


def test_what_json_has_no_word_for_reaches_a_service_as_null_and_keeps_no_row_back(serve: Serve):
    service = serve(lambda body, attempt: (200, json.dumps({"score": 1}), {}))
    assert grade(HttpSettings(url=service.url), ["a\ud800"]) == [1.0]
    about = service.bodies[0]["extra"]
    assert (about["weight"], about["range"], about["note"]) == (None, [0.0, None], "a\ud800")
    assert service.bodies[0]["response"] == "a\ud800"


@pytest.mark.parametrize("text", ["a\ud800", "\udc00 and \x00"])
def test_half_of_a_surrogate_pair_reaches_a_judge(serve: Serve, text: str):
    service = serve(lambda body, attempt: said("1"))
    assert grade(judge(service.url), [text]) == [1.0]
    assert asked(service.bodies[0]) == text


@pytest.mark.parametrize(
    "reply", ["[" * 100_000, '{"score": ' + "9" * 5000 + "}", '{"score": ' + "9" * 400 + "}", '{"score": NaN}']
)
def test_an_answer_that_is_no_number_of_ours_is_nonsense(serve: Serve, reply: str):
    service = serve(lambda body, attempt: (200, reply, {}))
    [text] = grade(HttpSettings(url=service.url, max_retries=0), ["a"])
    assert "nonsense" in str(text)


def test_limits_spread_requests_over_time():
    async def body() -> list[float]:
        limit = RateLimit(1200)
        started = time.monotonic()
        times = []
        for _ in range(25):
            await limit.take(1)
            times.append(time.monotonic() - started)
        return times

    times = asyncio.run(body())
    assert all(when >= (index + 1 - 20) / 20 - 0.01 for index, when in enumerate(times))


@pytest.mark.parametrize(("per_minute", "workers", "units"), [(1200, 4, 1), (1200, 1, 1), (150, 4, 1), (6000, 3, 250)])
def test_workers_together_admit_no_larger_burst_and_no_more_a_second_than_one(
    per_minute: float, workers: int, units: float, monkeypatch: pytest.MonkeyPatch
):
    """All begin at once, twice, with a pause in which any burst fills; in time that only their own waits move on."""
    together = [
        when for rank in range(workers) for when in admissions(RateLimit(per_minute, rank, workers), units, monkeypatch)
    ]
    alone = admissions(RateLimit(per_minute), units, monkeypatch, workers * REQUESTS)
    assert sorted(together) == pytest.approx(alone)


REQUESTS = 6


def admissions(limit: RateLimit, units: float, monkeypatch: pytest.MonkeyPatch, count: int = REQUESTS) -> list[float]:
    """When a limit lets `count` requests go that come at moment 1000, and as many that come at 9000."""
    return [
        *admitted(limit, units, monkeypatch, count, begin=1000.0),
        *admitted(limit, units, monkeypatch, count, begin=9000.0),
    ]


def admitted(
    limit: RateLimit,
    units: float,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *,
    begin: float = 1000.0,
    pause: float = 0.0,
) -> list[float]:
    """When a limit lets requests go, the next of which comes `pause` seconds after the one before it went."""
    now = begin

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def ask() -> list[float]:
        nonlocal now
        times: list[float] = []
        for _ in range(count):
            await limit.take(units)
            times.append(now)
            now += pause
        return times

    monkeypatch.setattr(rate_limits, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rate_limits, "asyncio", SimpleNamespace(sleep=sleep, Lock=asyncio.Lock))
    return asyncio.run(ask())


def test_a_worker_that_asks_less_often_than_it_may_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    """The service takes five seconds, and its share is a request in four."""
    assert admitted(RateLimit(60, 3, 4), 1, monkeypatch, 4, pause=5.0) == [1003.0, 1008.0, 1013.0, 1018.0]


def test_a_large_request_goes_on_credit_and_the_next_one_waits():
    async def body() -> float:
        limit = RateLimit(6000)
        await limit.take(150)
        started = time.monotonic()
        await limit.take(50)
        return time.monotonic() - started

    assert asyncio.run(body()) >= 0.9


CLEAR = {"0.5": 0.5, " 1 ": 1.0, "Score: 0.7.": 0.7, "7/10": 0.7, "0.8 out of 1": 0.8, "-1e-1": -0.1}
UNCLEAR = dict.fromkeys(["1/0", "", "from 0 to 1", "good"])


@pytest.mark.parametrize(("text", "number"), [*CLEAR.items(), *UNCLEAR.items()])
def test_numbers_are_read_only_where_they_are_clear(text: str, number: float | None):
    assert read_number(text) == (None if number is None else pytest.approx(number))


def test_a_secret_does_not_show():
    assert KEY not in f"{Secret(KEY)} {Secret(KEY)!r} {judge('http://x', key=Secret(KEY))}"


@pytest.mark.parametrize(
    ("text", "number"),
    [("1/2.5", 0.4), ("0.5/1.0", 0.5), ("0.8 for 3,4", 0.8), ("0.5, good", 0.5)]
    + [(text, None) for text in ("0,5", "Score: 0,75", "12,5/20", "1,000", "0,5 of 1")],
)
def test_a_decimal_comma_is_nonsense_and_a_fraction_may_have_points(text: str, number: float | None):
    assert read_number(text) == (None if number is None else pytest.approx(number))
