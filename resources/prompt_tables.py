"""Rows of prompts that come from elsewhere: JSON and parquet files, hub data sets, a function of yours.

A row that cannot be used is refused here, with its number and column, before anything is trained on it: an empty
prompt looks like a prompt to everything behind.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from configs.data import SourceConfig
from resources.import_paths import ImportPathError, import_callable

MOST_LISTED = 20


class PromptError(ValueError):
    """Prompts that cannot be used: which source, which rows, which column, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """One row as its source gives it."""

    index: int
    """Position in the source; the same for the same file or the same generator settings."""
    prompt: str | list[dict[str, str]]
    """A text, or chat messages."""
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


def origin_of(source: SourceConfig) -> str:
    """Where a source's rows come from, in words."""
    return f"{source.kind} {source.path!r}" if source.path else source.kind


def rows_of_table(source: SourceConfig, *, held_out: bool = False) -> list[SourceRow]:
    """Read and check a table of prompts.

    Raises:
        PromptError: for a table that cannot be read, a column that it lacks, and rows that cannot be used: a prompt or
            an answer that is null, a prompt that is empty or neither a text nor messages. Every such row is told. An
            answer may be empty, for graders that need none; those that compare find the row unscorable.
    """
    columns = [source.prompt_column, *([source.answer_column] if source.answer_column else [])]
    rows: list[SourceRow] = []
    bad: dict[str, list[int]] = {}
    names: Counter[str] = Counter()
    for index, entry in enumerate(_read(source, held_out)):
        if source.size is not None and index >= source.size:
            break
        names.update(entry.keys())
        wrong = [f"{column} {fault}" for column in columns if (fault := _fault(source, column, entry)) is not None]
        for what in wrong:
            bad.setdefault(what, []).append(index)
        if not wrong:
            rows.append(_row(source, index, entry, columns))
    absent = [column for column in columns if names and column not in names]
    if absent:
        raise PromptError(
            f"source {source.name!r}: no row of {origin_of(source)} has a column {absent[0]!r}; it has "
            f"{sorted(names)}: name the right one in prompt_column or answer_column (null where there is no answer)"
        )
    if bad:
        raise PromptError(
            f"source {source.name!r}: rows of {origin_of(source)} cannot be used ({_listed(bad)}); correct or remove "
            "them"
        )
    return rows


def _listed(bad: Mapping[str, Sequence[int]]) -> str:
    """Every kind of fault with its rows: the first of many, and how many there are."""
    told: list[str] = []
    for what, rows in list(bad.items())[:MOST_LISTED]:
        more = f" and {len(rows) - MOST_LISTED} more" if len(rows) > MOST_LISTED else ""
        told.append(f"{what}: row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:MOST_LISTED]))}{more}")
    return "; ".join(told)


def _fault(source: SourceConfig, column: str, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with a cell, in words; None when nothing is."""
    if column not in entry:
        return "is missing"
    value = entry[column]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "is null"
    if column != source.prompt_column:
        return _text_fault(value) if isinstance(value, str) else None
    if isinstance(value, str):
        return _text_fault(value) if value.strip() else "is empty"
    return _messages_fault(value)


def _text_fault(text: str) -> str | None:
    """JSON can spell half of a surrogate pair, which is no character: no tokenizer and no file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds {text[error.start]!r}, half of a surrogate pair"
    return None


def _messages_fault(value: object) -> str | None:
    if not isinstance(value, list):
        return f"is {value!r:.40}, neither a text nor a list of messages"
    if not value:
        return "is empty"
    for place, message in enumerate(cast("list[object]", value)):
        if not isinstance(message, Mapping):
            return f"has a message {place} that is {message!r:.40}, not {{role, content}}"
        said = cast("Mapping[str, object]", message)
        for key in ("role", "content"):
            text = said.get(key)
            if not isinstance(text, str):
                return f"has a message {place} whose {key} is {text!r:.40}, not a text"
            if fault := _text_fault(text):
                return f"has a message {place} whose {key} {fault}"
    return None


def _row(source: SourceConfig, index: int, entry: Mapping[str, Any], columns: Sequence[str]) -> SourceRow:
    prompt = entry[source.prompt_column]
    if not isinstance(prompt, str):
        prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
    answer = "" if source.answer_column is None else entry[source.answer_column]
    return SourceRow(
        index=index,
        prompt=prompt,
        answer=_answer_text(answer),
        extra={name: value for name, value in entry.items() if name not in columns},
    )


def _answer_text(answer: object) -> str:
    """As JSON writes it; what JSON has no type for (a decimal, a date) as its own text, without quotation marks."""
    if isinstance(answer, str):
        return answer
    is_json = isinstance(answer, bool | int | float | list | tuple | dict)
    return json.dumps(answer, default=str) if is_json else str(answer)


# Reading -------------------------------------------------------------------------------------------------------------


def _read(source: SourceConfig, held_out: bool) -> Iterable[Mapping[str, Any]]:
    path = str(source.path)
    if source.kind == "hub":
        return _load_from_hub(source, path)
    if source.kind == "python":
        return _call(source, held_out)
    file = Path(path)
    if not os.path.isfile(file):  # Path.is_file raises for a name that is too long
        raise PromptError(f"source {source.name!r}: {path!r} is no file; give the path of a {source.kind} file")
    return (_read_json if source.kind == "json" else _read_parquet)(source, file)


def _load_from_hub(source: SourceConfig, path: str) -> Iterable[Mapping[str, Any]]:
    import datasets  # pulls in pandas and pyarrow; only where it is used
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(path, split=source.split, **source.options)
    except (OSError, ValueError, TypeError, DatasetsError) as error:
        raise PromptError(
            f"source {source.name!r}: the data set {path!r} with split {source.split!r} cannot be loaded "
            f"({type(error).__name__}: {_first_line(error)}); check path, split and options, or download it to a "
            "folder and give that as path"
        ) from error


def _read_json(source: SourceConfig, path: Path) -> Iterable[Mapping[str, Any]]:
    """A JSON list of objects, or one object a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    except OSError as error:
        raise PromptError(
            f"source {source.name!r}: {path} cannot be read: {error.strerror}; check its permissions"
        ) from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number too long, lists too deep
        raise PromptError(
            f"source {source.name!r}: {path} is neither a JSON list nor one JSON object a line: {error}; convert it "
            "to JSON lines in UTF-8, or name its kind"
        ) from error
    return _objects(source, rows, str(path))


def _json_lines(text: str) -> list[Any]:
    """One value a line. Only a line feed ends one: a text may hold U+2028 and its like, at which `splitlines` cuts."""
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _read_parquet(source: SourceConfig, path: Path) -> Iterable[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(
            f"source {source.name!r}: {path} is no parquet file that can be read: {_first_line(error)}; write it "
            "again, or name its kind"
        ) from error


def _call(source: SourceConfig, held_out: bool) -> Iterable[Mapping[str, Any]]:
    if not str(source.path).partition(":")[2]:
        raise PromptError(f"source {source.name!r}: path is {source.path!r}; write module:function")
    try:
        function = import_callable(str(source.path))
    except ImportPathError as error:
        raise PromptError(f"source {source.name!r}: path is {source.path!r}; {error}") from error
    split = "validation" if held_out else source.split
    try:
        rows = list(function(split=split, size=source.size, seed=source.seed, **source.options))
    except Exception as error:  # the user's own function may raise whatever it likes
        raise PromptError(
            f"source {source.name!r}: {source.path} raised {type(error).__name__}: {_first_line(error)}; it is called "
            "with split, size, seed and data.sources[].options, and gives one mapping a row"
        ) from error
    return _objects(source, rows, str(source.path))


def _objects(source: SourceConfig, rows: Sequence[Any], path: str) -> Sequence[Mapping[str, Any]]:
    wrong = [index for index, row in enumerate(rows) if not isinstance(row, Mapping)]
    if wrong:
        raise PromptError(
            f"source {source.name!r}: rows {wrong[:MOST_LISTED]} of {path} are no objects with named columns; write "
            f'for example {{"{source.prompt_column}": ...}}'
        )
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
