"""An OpenAI-compatible endpoint on loopback over the rollout servers: agent frameworks are trained without a change.

    endpoint.open("episode-7", Terms(seed=7, sampling=sampling, max_tokens=64))
    client = OpenAI(base_url=endpoint.url_of("episode-7"), api_key="unused")

Every call is sampled by the newest weights, with log-probs, and kept in the log of its episode until `close_episode`.
At `/v1`, without an episode, anybody on this machine may talk to the policy; that is kept nowhere. Chat completions,
completions and models are there; streaming is not.
"""

import asyncio
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.openai_episodes import Branch, EpisodeLog, Opening
from resources.openai_requests import (
    BadRequest,
    Json,
    body_of,
    check_sampling,
    max_tokens_of,
    messages_of,
    prompt_of,
    seed_of,
    tools_of,
)
from resources.requests_on_the_way import Completion, RequestLostError
from resources.rollout_servers import RolloutServers
from resources.seeding import stream_seed
from resources.tools.calls import find_calls

START_SECONDS = 20.0
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an episode may use."""

    seed: int
    sampling: Sampling
    max_tokens: int
    """Of the whole episode after its first prompt, what the client adds included."""


class EndpointError(RuntimeError):
    """The endpoint cannot listen."""


class OpenAiEndpoint:
    """Serves until `close`; one thread."""

    def __init__(
        self,
        servers: RolloutServers,
        tokenizer: PreTrainedTokenizerBase,
        terms: Terms,
        *,
        max_model_length: int,
        port: int = 0,
    ) -> None:
        """`terms`: of requests outside any episode. `port` 0 picks a free one. Raises EndpointError for a taken one."""
        self.log = EpisodeLog(tokenizer)
        self._servers, self._tokenizer, self._visitor = servers, tokenizer, terms
        self._max_model_length = max_model_length
        self._open: dict[str, Terms] = {}
        self._asked: Counter[str] = Counter()
        """Episode -> its requests so far: each has noise of its own."""
        self._numbers = itertools.count(1)
        try:
            self._socket = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise EndpointError(
                f"rollout.servers.openai_port is {port}, where nothing more can listen ({error.strerror}); name another"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(self._app(), log_level="critical", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="openai-endpoint", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if time.monotonic() > end:
                raise EndpointError(f"the OpenAI endpoint on port {self.port} did not start within {START_SECONDS:g} s")
            time.sleep(0.01)

    def url_of(self, episode: str) -> str:
        """The `base_url` of an episode's client."""
        return f"http://127.0.0.1:{self.port}/episodes/{episode}/v1"

    def open(self, episode: str, terms: Terms) -> None:
        """Let clients play `episode`; its key stands in the address."""
        self._open[episode] = terms

    def close_episode(self, episode: str) -> list[Branch]:
        """What was sampled; a client that calls later is refused."""
        self._open.pop(episode, None)
        self._asked.pop(episode, None)
        return self.log.take(episode)

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join(timeout=10.0)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def _app(self) -> Starlette:
        routes: list[Route] = []
        for base in ("/v1", "/episodes/{episode}/v1"):
            routes += [
                Route(f"{base}/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route(f"{base}/completions", self._answering(self._complete), methods=["POST"]),
                Route(f"{base}/models", self._models),
            ]
        return Starlette(routes=routes)

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "callsheet"}]})

    def _answering(
        self, answer: Callable[[str, Mapping[str, Any]], Awaitable[Json]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def handle(request: Request) -> JSONResponse:
            try:
                body = body_of(await request.body())
                episode = str(request.path_params.get("episode", ""))
                if episode and episode not in self._open:
                    return _error(404, f"episode {episode!r} is not open: it has ended, or its address is wrong")
                check_sampling(body, self._visitor.sampling)
                return JSONResponse(await answer(episode, body))
            except RequestLostError as error:
                return _error(503, str(error))
            except ValueError as error:  # BadRequest, or a request that no template or engine can take
                return _error(400, str(error))

        return handle

    async def _chat(self, episode: str, body: Mapping[str, Any]) -> Json:
        tools = tools_of(body)
        opening = self.log.begin(episode, messages_of(body), tools)
        answer = await self._sample(opening, body)
        text = str(self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True))
        message: Json = {"role": "assistant", "content": text}
        calls = find_calls(text, "json", {}) if tools else []
        if calls and all(call.problem is None for call in calls):
            message["content"] = text.partition("<tool_call>")[0] or None
            message["tool_calls"] = [
                {
                    "id": f"call_{next(self._numbers)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in calls
            ]
        self._keep(opening, answer, message)
        reason = "tool_calls" if "tool_calls" in message else _REASONS[answer.finish_reason]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": self._log_probs(answer)}
        return self._body("chat.completion", choice, len(opening.ids), answer)

    async def _complete(self, episode: str, body: Mapping[str, Any]) -> Json:
        opening = self.log.begin_text(episode, prompt_of(body))
        answer = await self._sample(opening, body)
        self._keep(opening, answer, None)
        text = str(self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True))
        choice = {"index": 0, "text": text, "finish_reason": _REASONS[answer.finish_reason], "logprobs": None}
        return self._body("text_completion", choice, len(opening.ids), answer)

    async def _sample(self, opening: Opening, body: Mapping[str, Any]) -> Completion:
        terms = self._open.get(opening.episode, self._visitor)
        asked, seed, ids = max_tokens_of(body), seed_of(body), opening.ids
        left = min(self._max_model_length - len(ids), terms.max_tokens - opening.response_length)
        if left < 1:
            raise BadRequest(
                f"the conversation has {len(ids)} tokens, the context holds {self._max_model_length} and the episode "
                f"may add {terms.max_tokens} to its first prompt; nothing is left for an answer"
            )
        self._asked[opening.episode] += 1
        number = self._asked[opening.episode]
        request = GenerationRequest(
            row_id=next(self._numbers),
            prompt_ids=ids,
            seed=stream_seed(terms.seed, f"request {number}", seed),
            max_tokens=left if asked is None else min(asked, left),
        )
        return await asyncio.wrap_future(self._servers.submit(request, terms.sampling))

    def _keep(self, opening: Opening, answer: Completion, message: Json | None) -> None:
        """An episode that was closed while this was sampled keeps nothing more."""
        if opening.episode in self._open:
            self.log.finish(opening, answer, message)

    def _log_probs(self, answer: Completion) -> Json:
        pieces = [str(self._tokenizer.decode([token])) for token in answer.token_ids]
        pairs = zip(pieces, answer.log_probs, strict=True)
        return {"content": [{"token": piece, "logprob": value, "top_logprobs": []} for piece, value in pairs]}

    def _body(self, kind: str, choice: Json, prompt_tokens: int, answer: Completion) -> Json:
        sampled = len(answer.token_ids)
        usage = {
            "prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled,
        }  # fmt: skip
        return {
            "id": f"{kind}-{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": "policy",
            "choices": [choice],
            "usage": usage,
        }


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status_code=status)
