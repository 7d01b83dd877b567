"""Graders behind HTTP: a generative judge on any OpenAI-compatible endpoint, and a plain reward service.

Rate, token and concurrency limits are kept before a request leaves; 429, 5xx, silence and nonsense are tried again with
a growing, jittered pause. A key goes into a request's header and nowhere else.
"""

import asyncio
import ipaddress
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from resources.grader_calls import arguments_of, group_arguments
from resources.graders import Cause, Grader, GraderFailedError, Outcome, Sample, Secret, check_scores
from resources.rate_limits import RateLimit, share_of

SERVED_HERE: dict[str, str] = {}
"""Name of a grader -> where the judge of this very process listens; see resources/workers/judge.py."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
_DECIMAL_COMMA = re.compile(r"\d,\d")
_CHARACTERS_PER_TOKEN = 3.0
"""To estimate a request's tokens before it is sent; low, so that the limit is kept."""
_MAX_BODY_BYTES = 1 << 20
_JSON = {"Content-Type": "application/json"}
_NO_SUCCESS, _TIMEOUT_STATUS, _TOO_MANY, _SERVER_ERROR = 300, 408, 429, 500


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """A judge: where it is, what it is asked, and its limits for all reward workers together."""

    base_url: str
    """Empty for a judge that the run serves itself: it listens in the process of each reward worker."""
    model: str
    prompt: str
    """With {prompt}, {answer} and {response} to be filled in."""
    key: Secret | None = None
    max_tokens: int = 8
    max_concurrency: int = 8
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_retries: int = 4
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    low: float = 0.0
    high: float = 1.0
    """A number outside [low, high] is nonsense: a judge that says 95 did not understand the scale."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """A reward service: POST a JSON object, get a number, a list of numbers for a group, or {"score": ...}."""

    url: str
    max_concurrency: int = 16
    max_retries: int = 2
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 10.0


class _TryAgainError(GraderFailedError):
    """A failure that may pass: the service said when (seconds), or did not."""

    def __init__(self, cause: Cause, text: str, seconds: float, after: float | None = None) -> None:
        super().__init__(cause, text, seconds)
        self.after = after


class HttpBackend:
    """Asks a reward service; the base of the judge."""

    def __init__(
        self,
        settings: HttpSettings | JudgeSettings,
        url: str,
        rank: int = 0,
        world_size: int = 1,
        key: Secret | None = None,
    ) -> None:
        """Raises ValueError for more workers than `max_concurrency`."""
        self._retries = settings.max_retries
        self._first_pause, self._longest_pause = settings.first_pause_seconds, settings.longest_pause_seconds
        self._url = url
        self._slots = share_of(settings.max_concurrency, rank, world_size)
        if settings.max_concurrency < world_size:
            raise ValueError(
                f"max_concurrency is {settings.max_concurrency} and there are {world_size} reward workers, each of "
                "which needs a request of its own; raise it, or give the reward role fewer workers"
            )
        self._turn = asyncio.Semaphore(self._slots)
        headers = {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}
        limits = httpx.Limits(max_connections=self._slots, max_keepalive_connections=self._slots)
        self._client = httpx.AsyncClient(
            headers=headers, limits=limits, trust_env=bool(url) and not is_loopback(url), timeout=None
        )

    @property
    def workers(self) -> int:
        return self._slots

    async def grade(self, grader: Grader, samples: Sequence[Sample]) -> Outcome:
        body = group_arguments(samples) if grader.is_group_wise else arguments_of(samples[0])
        return await self._retried(grader, body, samples)

    async def close(self) -> None:
        await self._client.aclose()

    async def _retried(self, grader: Grader, body: Mapping[str, Any], samples: Sequence[Sample]) -> Outcome:
        attempts = AsyncRetrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=self._pause,
            retry=retry_if_exception_type(_TryAgainError),
            reraise=True,
        )
        async for attempt in attempts:
            with attempt:
                async with self._turn:
                    await self._admit(body)
                    started = time.monotonic()
                    answer = await self._post(grader.timeout_seconds, body, started)
                    seconds = time.monotonic() - started
                    return Outcome(scores=self._read(answer, grader, samples, seconds), seconds=seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _admit(self, body: Mapping[str, Any]) -> None:
        """Wait for the rate limits."""

    def _read(self, answer: Any, grader: Grader, samples: Sequence[Sample], seconds: float) -> tuple[float, ...]:
        if isinstance(answer, dict):
            answer = answer.get("scores", answer.get("score"))
        try:
            return check_scores(answer, len(samples), grader.name, seconds, is_group=grader.is_group_wise)
        except GraderFailedError as error:
            raise _TryAgainError("nonsense", str(error), seconds) from None

    def _pause(self, state: RetryCallState) -> float:
        """Full jitter, doubling; never less than the service asked for."""
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.after if isinstance(error, _TryAgainError) and error.after is not None else 0.0
        spread = wait_random_exponential(multiplier=self._first_pause, max=self._longest_pause)(state)
        return min(asked, self._longest_pause) + spread

    async def _post(self, timeout: float, body: Mapping[str, Any], started: float) -> Any:
        """The JSON of a reply. Raises _TryAgainError for what may pass, GraderFailedError for what will not."""
        where = _place(self._url)
        try:
            async with asyncio.timeout(timeout):
                reply = await self._send(body)
        except TimeoutError:
            raise _TryAgainError(
                "timeout", f"{where} did not answer within {timeout:g} s", time.monotonic() - started
            ) from None
        except httpx.HTTPError as error:
            text = f"{where} cannot be asked: {type(error).__name__}"
            raise _TryAgainError("error", text, time.monotonic() - started) from None
        status, data, retry_after = reply
        seconds = time.monotonic() - started
        if status in (_TOO_MANY, _TIMEOUT_STATUS) or status >= _SERVER_ERROR:
            raise _TryAgainError("error", f"{where} answered {status}", seconds, retry_after)
        if status >= _NO_SUCCESS:
            raise GraderFailedError("error", f"{where} answered {status}", seconds)
        try:
            return httpx.Response(status, content=data).json()
        except (RecursionError, ValueError):
            raise _TryAgainError("nonsense", f"{where} answered no JSON: {data[:60]!r}", seconds) from None

    async def _send(self, body: Mapping[str, Any]) -> tuple[int, bytes, float | None]:
        async with self._client.stream("POST", self._url, content=_encoded(body), headers=_JSON) as reply:
            data = b""
            async for part in reply.aiter_bytes():
                data += part
                if len(data) > _MAX_BODY_BYTES:
                    break
            return reply.status_code, data, _seconds(reply.headers.get("retry-after"))


class JudgeBackend(HttpBackend):
    """Asks a model for a number."""

    def __init__(self, settings: JudgeSettings, rank: int = 0, world_size: int = 1) -> None:
        """Limits are divided over `world_size` reward workers."""
        # Each reward worker has a served judge of its own, so there is nothing to share.
        place = (rank, world_size) if settings.base_url else (0, 1)
        super().__init__(settings, settings.base_url, *place, settings.key)
        self._settings = settings
        self._requests = RateLimit(settings.requests_per_minute, rank, world_size)
        self._tokens = RateLimit(settings.tokens_per_minute, rank, world_size)

    async def grade(self, grader: Grader, samples: Sequence[Sample]) -> Outcome:
        one = samples[0]
        words = {"prompt": one.prompt, "answer": one.answer, "response": one.response}
        # One pass: braces in a response are text, and a response cannot bring in another field.
        text = re.sub(r"\{(prompt|answer|response)\}", lambda found: str(words[found[1]]), self._settings.prompt)
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._settings.max_tokens,
            "temperature": 0.0,
        }
        if not self._settings.base_url and grader.name not in SERVED_HERE:
            raise GraderFailedError("error", f"no judge of grader {grader.name!r} listens in this process")
        self._url = (self._settings.base_url or SERVED_HERE[grader.name]).rstrip("/") + "/chat/completions"
        return await self._retried(grader, body, samples)

    async def _admit(self, body: Mapping[str, Any]) -> None:
        await self._requests.take(1)
        content = body["messages"][0]["content"]
        await self._tokens.take(len(content) / _CHARACTERS_PER_TOKEN + self._settings.max_tokens)

    def _read(self, answer: Any, grader: Grader, samples: Sequence[Sample], seconds: float) -> tuple[float, ...]:
        try:
            text = str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise _TryAgainError("nonsense", f"judge {grader.name!r} answered {str(answer)[:60]!r}", seconds) from None
        score = read_number(text)
        if score is None or not self._settings.low <= score <= self._settings.high:
            raise _TryAgainError("nonsense", f"judge {grader.name!r} said {text[:60]!r}, which is no score", seconds)
        return (score,)


def _encoded(body: Mapping[str, Any]) -> bytes:
    """JSON in ASCII, so that half of a surrogate pair has a spelling; a row's nan and infinity become null."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(body), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_number(text: str) -> float | None:
    """The number a judge gives: one that begins the text, or the only one in it; `7/10` counts as 0.7. None otherwise.

    None too for a decimal comma: `0,5` is neither 0 nor 5.

    >>> read_number("0.5 out of 1"), read_number("Score: 8/10."), read_number("between 0 and 1"), read_number("good")
    (0.5, 0.8, None, None)
    """
    found, begins = _NUMBER.findall(text), _NUMBER.match(text.strip()) is not None
    if not found or (len(found) > 1 and not begins) or _DECIMAL_COMMA.search(text.split()[0] if begins else text):
        return None
    top, _, bottom = found[0].partition("/")
    if not bottom:
        return float(top)
    return float(top) / float(bottom) if float(bottom) else None


def is_loopback(url: str) -> bool:
    """Whether an address is this machine; a proxy of the environment is not asked for those."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _place(url: str) -> str:
    """An address for messages: without user, password and query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


def _share(limit: float | None, world_size: int) -> float | None:
    return None if limit is None else limit / world_size


def _seconds(header: str | None) -> float | None:
    """The Retry-After header in seconds; a date is not read."""
    return float(header) if header is not None and header.isdigit() else None
