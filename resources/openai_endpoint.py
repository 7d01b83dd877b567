"""An OpenAI-compatible endpoint on loopback over the rollout servers: agent frameworks are trained without a change.

    client = OpenAI(base_url=endpoint.url_of("episode-7"), api_key="unused")

Every call is sampled by the newest weights, with log-probs, and kept in the log of its episode. Chat completions,
completions and models are there; streaming is not.
"""

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.openai_episodes import EpisodeLog
from resources.rollout_servers import Completion, RequestLostError, RolloutServers
from resources.seeding import stream_seed
from resources.tools.calls import find_calls

Json = dict[str, Any]
START_SECONDS = 20.0
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}
_REFUSED = ("stop", "logit_bias", "frequency_penalty", "presence_penalty", "best_of", "suffix", "response_format")
"""What would change the distribution, or the text, behind the log-probs that are trained."""


class BadRequest(ValueError):  # noqa: N818 - HTTP's own name for it
    """A request that is answered with status 400 and this text."""


class OpenAiEndpoint:
    """Serves until `close`; one thread."""

    def __init__(
        self,
        servers: RolloutServers,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        max_model_length: int,
        max_tokens: int,
        seed: int,
        port: int = 0,
    ) -> None:
        """`sampling`: the run's distribution; a client may not choose another. `port` 0 picks a free one."""
        self.log = EpisodeLog(tokenizer)
        self._servers, self._tokenizer, self._sampling = servers, tokenizer, sampling
        self._max_model_length, self._max_tokens, self._seed = max_model_length, max_tokens, seed
        self._numbers = itertools.count(1)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(self._app(), log_level="critical", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="openai-endpoint", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if time.monotonic() > end:
                raise RuntimeError(f"the OpenAI endpoint on port {self.port} did not start within {START_SECONDS:g} s")
            time.sleep(0.01)

    def url_of(self, episode: str) -> str:
        """The `base_url` of an episode's client."""
        return f"http://127.0.0.1:{self.port}/episodes/{episode}/v1"

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join(timeout=10.0)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def _app(self) -> Starlette:
        base = "/episodes/{episode}/v1"
        return Starlette(
            routes=[
                Route(f"{base}/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route(f"{base}/completions", self._answering(self._complete), methods=["POST"]),
                Route(f"{base}/models", self._models),
            ]
        )

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "callsheet"}]})

    def _answering(
        self, answer: Callable[[str, Mapping[str, Any]], Awaitable[Json]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def handle(request: Request) -> JSONResponse:
            try:
                body = json.loads(await request.body())
                if not isinstance(body, dict):
                    raise BadRequest("the body is no JSON object")
                self._check(body)
                return JSONResponse(await answer(str(request.path_params["episode"]), body))
            except RequestLostError as error:
                return _error(503, str(error))
            except ValueError as error:  # JSON, BadRequest, or a request that no engine can answer
                return _error(400, str(error))

        return handle

    def _check(self, body: Mapping[str, Any]) -> None:
        used = [name for name in _REFUSED if body.get(name) not in (None, 0, {}, [], {"type": "text"})]
        if used or body.get("stream") or (body.get("n") or 1) != 1:
            named = used or (["stream"] if body.get("stream") else ["n"])
            raise BadRequest(f"{named[0]} is not served: what is sampled here is trained; leave it out")
        temperature = body.get("temperature")
        if temperature is not None and temperature != self._sampling.temperature:
            raise BadRequest(
                f"temperature is {temperature} and the run samples at {self._sampling.temperature}; log-probs are of "
                "that distribution, so leave it out"
            )

    async def _chat(self, episode: str, body: Mapping[str, Any]) -> Json:
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages is empty; give at least one")
        branch, ids = self.log.begin(episode, messages, tools)
        answer = await self._sample(episode, ids, body)
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
        self.log.finish(branch, answer, message)
        reason = "tool_calls" if "tool_calls" in message else _REASONS[answer.finish_reason]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": self._log_probs(answer)}
        return self._body("chat.completion", choice, len(ids), answer)

    async def _complete(self, episode: str, body: Mapping[str, Any]) -> Json:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise BadRequest("prompt is one text or one list of token ids")
        branch = self.log.begin_text(episode, prompt)
        answer = await self._sample(episode, prompt, body)
        self.log.finish(branch, answer, None)
        text = str(self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True))
        choice = {"index": 0, "text": text, "finish_reason": _REASONS[answer.finish_reason], "logprobs": None}
        return self._body("text_completion", choice, len(prompt), answer)

    async def _sample(self, episode: str, ids: list[int], body: Mapping[str, Any]) -> Completion:
        left = self._max_model_length - len(ids)
        if left < 1:
            raise BadRequest(
                f"the conversation has {len(ids)} tokens and the context holds {self._max_model_length}; nothing is "
                "left for an answer"
            )
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self._max_tokens
        number = next(self._numbers)
        request = GenerationRequest(
            row_id=number,
            prompt_ids=tuple(ids),
            seed=stream_seed(self._seed, f"episode {episode} {len(ids)}", int(body.get("seed") or 0)),
            max_tokens=max(1, min(int(asked), left)),
        )
        return await asyncio.wrap_future(self._servers.submit(request, self._sampling))

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
