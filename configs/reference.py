"""The table of all keys in docs/configuration.md, made from the fields.

`python -m configs.reference` writes it anew; a test compares.
"""

import json
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.run import RunConfig

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
_WORDS = {NoneType: "null", int: "integer", float: "number", str: "text", bool: "true | false", Any: "anything"}
MARK = "<!-- below this line: python -m configs.reference -->\n"


def reference_text() -> str:
    """One table per section, in the order of the code; a section that several keys hold stands once."""
    parts: list[str] = []
    queue: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    seen: set[type[BaseModel]] = set()
    while queue:
        path, section = queue.pop(0)
        if section in seen:
            continue
        seen.add(section)
        doc = " ".join((section.__doc__ or "").split())
        title = f"### {f'`{path}`' if path else 'Top level'}"
        parts.append(f"{title}\n\n{doc}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        rows: list[str] = []
        for name, field in section.model_fields.items():
            inner = list(_sections(field.annotation, f"{path}.{name}" if path else name))
            queue += inner
            rows.append(_row(name, field, inner))
        parts[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(parts) + "\n"


def _row(name: str, field: FieldInfo, inner: list[tuple[str, type[BaseModel]]]) -> str:
    kind = f"section `{inner[0][0]}`" if inner else f"`{_type_text(field.annotation)}`"
    meaning = " ".join((field.description or "").split())
    return f"| `{name}` | {_cell(kind)} | {_default(field)} | {_cell(meaning)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "as in its section"
    if value in ((), {}):
        return "none"
    return _cell(f"`{json.dumps(value)}`")  # JSON is YAML


def _type_text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_text(arguments[0])
    if origin is typing.Literal:
        return " | ".join(argument if isinstance(argument, str) else json.dumps(argument) for argument in arguments)
    if origin in (typing.Union, UnionType):
        return " | ".join(_type_text(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return f"name: {_type_text(arguments[1])}"
    return _WORDS.get(annotation, str(annotation))


def _sections(annotation: Any, path: str) -> list[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(path, annotation)]
    origin = typing.get_origin(annotation)
    star = "[i]" if origin is tuple else ".<name>" if origin is dict else ""
    arguments = [argument for argument in typing.get_args(annotation) if not isinstance(argument, str)]
    return [found for argument in arguments for found in _sections(argument, path + star)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    head = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0]
    DOCUMENT.write_text(head + MARK + "\n" + reference_text(), encoding="utf-8")
    print(f"wrote {DOCUMENT}")
