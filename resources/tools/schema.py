"""Python functions as tools: what a model is told of them, and a call whose failure is a text the model can read."""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from resources.import_paths import ImportPathError, import_callable

Json = dict[str, Any]

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class ToolError(ValueError):
    """A tool that cannot be offered, or a call that cannot be made; the text says what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function with the schema made from its type hints and docstring.

    >>> def double(x: int) -> int:
    ...     '''Twice a number.
    ...
    ...     Args:
    ...         x: the number.
    ...     '''
    ...     return 2 * x
    >>> tool = describe_tool(double)
    >>> tool.schema()["function"]["parameters"]["properties"]
    {'x': {'type': 'integer', 'description': 'the number.'}}
    >>> tool.call({"x": 21}), tool.call({"x": "many"})
    (('42', True), ("error: argument x is 'many', which is no integer", False))
    """

    name: str
    description: str
    function: Callable[..., Any]
    parameters: Mapping[str, Json]
    """Name -> JSON schema of the argument."""
    required: tuple[str, ...]

    def schema(self) -> Json:
        """As chat templates and OpenAI's API want it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": dict(self.parameters),
                    "required": list(self.required),
                    "additionalProperties": False,
                },
            },
        }

    def call(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The result as text, and whether it is one: every failure is a text that begins with `error:`."""
        problem = self._problem(arguments)
        if problem is not None:
            return f"error: {problem}", False
        try:
            result = self.function(**arguments)
            text = result if isinstance(result, str) else _as_text(result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises, the model reads it and goes on
            return _as_utf8(f"error: {type(error).__name__}: {error}"), False
        return _as_utf8(text), True

    def _problem(self, arguments: Mapping[str, Any]) -> str | None:
        missing = [name for name in self.required if name not in arguments]
        unknown = [name for name in arguments if name not in self.parameters]
        if missing or unknown:
            parts = [f"argument {name} is missing" for name in missing] + [f"no argument {name}" for name in unknown]
            return f"{self.name} takes {', '.join(self.parameters) or 'no arguments'}: {'; '.join(parts)}"
        for name, value in arguments.items():
            if not _fits(value, self.parameters[name]):
                kind = self.parameters[name].get("type", "value of its type")
                return f"argument {name} is {value!r:.60}, which is no {kind}"
        return None


def describe_tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a function. Raises ToolError naming a parameter without a type hint, or of a type JSON lacks."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ToolError(f"tool {name!r}: its type hints cannot be read ({error}); name types that exist") from error
    summary, texts = _read_docstring(function)
    parameters: dict[str, Json] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolError(
                f"tool {name!r}: parameter {parameter.name!r} has no name a model could give; name each one"
            )
        if parameter.name not in hints:
            raise ToolError(f"tool {name!r}: parameter {parameter.name!r} has no type hint; the schema is made from it")
        described = {"description": texts[parameter.name]} if parameter.name in texts else {}
        parameters[parameter.name] = {**_schema_of(hints[parameter.name], f"{name}.{parameter.name}"), **described}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return Tool(name=name, description=summary, function=function, parameters=parameters, required=tuple(required))


def load_tools(paths: tuple[str, ...]) -> dict[str, Tool]:
    """The tools at `module:function`, by name. Raises ToolError for a path that leads nowhere or a name given twice."""
    tools: dict[str, Tool] = {}
    for path in paths:
        try:
            tool = describe_tool(import_callable(path))
        except ImportPathError as error:
            raise ToolError(f"tool {path!r}: {error}") from error
        if tool.name in tools:
            raise ToolError(f"two tools are named {tool.name!r}; a model could not tell them apart, rename one")
        tools[tool.name] = tool
    return tools


def _schema_of(hint: Any, where: str) -> Json:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(part, where) for part in arguments]}
    if origin is list or hint is list:
        return {"type": "array", **({"items": _schema_of(arguments[0], where)} if arguments else {})}
    if origin is dict or hint is dict:
        return {"type": "object"}
    raise ToolError(f"tool parameter {where} is a {hint}, which JSON has no word for; use str, int, float, bool, list, "
                    "dict or Literal")  # fmt: skip


def _fits(value: Any, schema: Json) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "array":
        return isinstance(value, list) and all(_fits(item, schema.get("items", {})) for item in value)
    if kind in ("integer", "number"):
        right = int if kind == "integer" else (int, float)
        return isinstance(value, right) and not isinstance(value, bool)
    kinds: dict[Any, Any] = {"string": str, "boolean": bool, "null": type(None), "object": dict, None: object}
    return isinstance(value, kinds[kind])


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before `Args:`, and what stands there of each parameter."""
    head, _, tail = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    found = re.findall(r"^ {4}(\w+): *(.*(?:\n {8,}.*)*)", tail, flags=re.MULTILINE)
    return " ".join(head.split()), {name: " ".join(text.split()) for name, text in found}


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _as_utf8(text: str) -> str:
    """Half of a surrogate pair is no character that a tokenizer takes; a question mark stands in for it."""
    return text.encode(errors="replace").decode()
