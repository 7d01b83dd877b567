"""Tool calls found in what a model wrote.

Two notations. `json`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it; several
in one turn are legal. `inline`: `[name(text)]`, for tools of one text argument and models of characters. Text is only
*read* here; the ids that are trained are those that were sampled.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from resources.tools.schema import Tool

Notation = Literal["json", "inline"]
CLOSING: dict[Notation, str] = {"json": "</tool_call>", "inline": "]"}
"""What a call ends with; where it is one token, sampling stops at it."""
_JSON = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_INLINE = re.compile(r"\[(\w+)\((.*?)\)\]", re.DOTALL)
_BROKEN_INLINE = re.compile(r"\[(\w*)[^\[\]]*\]")
_TOO_MUCH = "{} is nested too deep, or holds a number of too many digits"


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, or why there is none where one was begun.

    >>> find_calls("so [calculate(2*3)]", "inline", {})
    [ToolCall(name='calculate', argument='2*3', arguments=None, problem=None)]
    """

    name: str
    argument: str | None = None
    """The one argument of an inline call."""
    arguments: Mapping[str, Any] | None = field(default=None)
    problem: str | None = None


def find_calls(text: str, notation: Notation, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """The calls in a turn, in order. What begins as a call and is none comes with `problem`, for the model to read."""
    return _json_calls(text) if notation == "json" else _inline_calls(text, tools)


def _json_calls(text: str) -> list[ToolCall]:
    return [_json_call(body.strip()) for body in _JSON.findall(text)]


def _json_call(body: str) -> ToolCall:
    try:
        parsed = json.loads(body)
    except json.JSONDecodeError as error:
        return ToolCall(name="", problem=f"the tool call is not JSON: {error.msg} at character {error.pos}")
    except (RecursionError, ValueError):
        return ToolCall(name="", problem=_TOO_MUCH.format("the tool call"))
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return ToolCall(name="", problem='a tool call is {"name": ..., "arguments": {...}}')
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's own form: JSON inside JSON
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            return ToolCall(name=parsed["name"], problem=f"arguments are not JSON: {error.msg}")
        except (RecursionError, ValueError):
            return ToolCall(name=parsed["name"], problem=_TOO_MUCH.format("the text of arguments"))
    if not isinstance(arguments, dict):
        return ToolCall(name=parsed["name"], problem=f"arguments are {arguments!r:.40}; give an object")
    return ToolCall(name=parsed["name"], arguments=arguments)


def _inline_calls(text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
    found = [ToolCall(name=name, argument=argument) for name, argument in _INLINE.findall(text)]
    if not found and (broken := _BROKEN_INLINE.search(text)) is not None:
        example = next(iter(tools), "name")
        return [ToolCall(name=broken[1], problem=f"write a call as [{example}(...)]")]
    return found


def make_call(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """Text for the model, and whether the tool answered. Never raises."""
    if call.problem is not None:
        return f"error: {call.problem}", False
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r:.40}; tools are {', '.join(sorted(tools))}", False
    if call.argument is not None:
        if len(tool.parameters) != 1:
            return f"error: {call.name} takes {len(tool.parameters)} arguments; inline calls give one", False
        return tool.call({next(iter(tool.parameters)): call.argument})
    return tool.call(call.arguments or {})
