"""What a client of the OpenAI endpoint may ask: requests that would be sampled otherwise than the run does are refused.

What is sampled is trained, and its log-probs are of the run's distribution. A field that says something else is never
passed over in silence.
"""

import json
from collections.abc import Mapping
from typing import Any

from resources.engines.base import Sampling

Json = dict[str, Any]

_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "suffix": ("",),
    "echo": (False,),
    "stream": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    # what vLLM's server takes besides
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structured_outputs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    # and others
    "typical_p": (1,),
}
"""Field that would change the distribution, the prompt or the answer's text -> values of it that change nothing."""


class BadRequest(ValueError):  # noqa: N818 - HTTP's own name for it
    """A request that is answered with status 400 and this text."""


def body_of(raw: bytes) -> Json:
    """The request. Raises BadRequest for what is no JSON object."""
    try:
        body = json.loads(raw)
    except RecursionError:
        raise BadRequest("the body is nested too deep") from None
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def check_sampling(body: Mapping[str, Any], sampling: Sampling) -> None:
    """Raise BadRequest for a field that asks for another distribution than the run's, or for another text."""
    for name, neutral in _NOT_SERVED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(
                f"{name} is not served: what is sampled here is trained as the run samples it; leave {value!r:.60} out"
            )
    sampled: dict[str, float] = {"temperature": 0.0}
    if not sampling.greedy:  # else there is nothing that they could cut
        sampled = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": 0.0,
        }  # fmt: skip
    for name, own in sampled.items():
        value = body.get(name)
        if name == "top_k" and value == -1:
            value = 0  # two ways to say that none is cut
        if value is not None and value != own:
            raise BadRequest(
                f"{name} is {value!r:.60} and the run samples at {own}; log-probs are of that distribution, so "
                "leave it out"
            )


def messages_of(body: Mapping[str, Any]) -> list[Json]:
    """The conversation, the content of each message as one text. Raises BadRequest for what is none."""
    messages = body.get("messages")
    if not messages:
        raise BadRequest("messages is empty; give at least one")
    return [_message(f"messages.{place}", message) for place, message in enumerate(_list("messages", messages))]


def _message(path: str, message: Any) -> Json:
    if not isinstance(message, dict):
        raise _wrong(path, message, 'an object like {"role": "user", "content": "..."}')
    if not isinstance(message.get("role"), str):
        raise _wrong(f"{path}.role", message.get("role"), "a text like user")
    if not isinstance(message.get("name"), str | None):
        raise _wrong(f"{path}.name", message["name"], "a text")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(_text(f"{path}.content.{place}", part) for place, part in enumerate(content))
    elif not isinstance(content, str | None):
        raise _wrong(f"{path}.content", content, "a text, or a list of parts of type text")
    for place, call in enumerate(_objects(f"{path}.tool_calls", calls or [])):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{path}.tool_calls.{place}.function", function, "an object with the name of the function")
    return {**message, "content": content}


def _text(path: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise _wrong(path, part, 'an object like {"type": "text", "text": "..."}; the policy reads text alone')


def tools_of(body: Mapping[str, Any]) -> list[Json] | None:
    """The tools that are offered. Raises BadRequest for what is no list of objects."""
    return _objects("tools", body.get("tools") or []) or None


def prompt_of(body: Mapping[str, Any]) -> str | list[int]:
    """Of a completion. Raises BadRequest for several, or none."""
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise BadRequest("prompt is one text or one list of token ids")
    return prompt


def max_tokens_of(body: Mapping[str, Any]) -> int | None:
    """Tokens asked for at most; None where the client leaves it open. Raises BadRequest for anything but a count."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise _wrong(name, value, "a whole number from 1 on; leave it out for as many as there is room for")
            return value
    return None


def seed_of(body: Mapping[str, Any]) -> int:
    """The client's own, which goes into the request's noise. Raises BadRequest for what is no whole number."""
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise _wrong("seed", seed, "a whole number")
    return seed or 0


def _objects(path: str, value: Any) -> list[Json]:
    for place, one in enumerate(_list(path, value)):
        if not isinstance(one, dict):
            raise _wrong(f"{path}.{place}", one, "an object")
    return value


def _list(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(path, value, "a list of objects")
    return value


def _wrong(path: str, value: object, what: str) -> BadRequest:
    return BadRequest(f"{path} is {value!r:.60}; it is {what}")
