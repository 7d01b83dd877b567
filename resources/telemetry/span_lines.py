"""Records of spans as lines of JSON: written whatever they hold, read only where every number in them is one."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from resources.telemetry.facts import FACTS
from resources.telemetry.spans import (
    ClockRecord,
    Collect,
    Dispatch,
    IterationSpan,
    PoolRecord,
    RankSpan,
    Record,
    RunRecord,
    TaskSpan,
    Waits,
)

_KINDS: dict[str, type[TaskSpan] | type[IterationSpan] | type[ClockRecord] | type[RunRecord]] = {
    kind.RECORD: kind for kind in (TaskSpan, IterationSpan, ClockRecord, RunRecord)
}


def encode(record: Record) -> str:
    """One line of spans.jsonl, with its line end.

    >>> decode(encode(IterationSpan(iteration=3, started=0.0, ended=2.5)))
    IterationSpan(iteration=3, started=0.0, ended=2.5, attempt=1, facts={})
    """
    written = {"record": record.RECORD, **record.to_json()}
    try:
        return json.dumps(written, separators=(",", ":"), allow_nan=False, default=_as_number) + "\n"
    except ValueError:  # a NaN among the facts must not end a run; JSON has no word for it but null
        return json.dumps(_finite(written), separators=(",", ":"), allow_nan=False, default=_as_number) + "\n"


def _as_number(value: object) -> float | str:
    """numpy's numbers are registered as real; anything else is told in words."""
    return float(value) if isinstance(value, Real) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, Real) and not math.isfinite(float(value)) else value


def decode(line: str | bytes) -> Record:
    """The record of one line; one without `record` is a task. Raises ValueError, with what is wrong, else.

    Whoever adds up a record's numbers meets none that is missing: a field that is null, or no number, is refused with
    its line, and of the facts the null ones are left out, as never measured. A null is what a NaN becomes on its way.
    """
    try:
        record = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep to be a record") from None
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, not {type(record).__name__}")
    name = record.get("record", TaskSpan.RECORD)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"record {name!r:.60} is unknown here; known are {sorted(_KINDS)}")
    if b"null" in line if isinstance(line, bytes) else "null" in line:
        record = _measured(record)
    try:
        read = kind.from_json(record)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kind.RECORD} record: {error}") from error
    _check(read)
    return read


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without the facts, its own and its ranks', that hold a null."""
    kept = {name: value for name, value in record.items() if not (name in FACTS and _holds_null(value))}
    if isinstance(ranks := kept.get("ranks"), list):
        kept["ranks"] = [_measured(rank) if isinstance(rank, dict) else rank for rank in ranks]
    return kept


def _holds_null(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(_holds_null(one) for one in inner)


_WHOLE = frozenset({"iteration", "attempt", "rank"})
"""Numbers that name something."""
_LARGEST = 1e300
_NUMBERS, _TEXTS = (
    {
        cls: tuple(f.name for f in fields(cls) if f.type in kinds)
        for cls in (TaskSpan, RankSpan, Waits, Dispatch, Collect, IterationSpan, RunRecord, PoolRecord)
    }
    for kinds in ((int, float), (str,))
)


def _check(record: Record) -> None:
    """Raises ValueError for a field of a record, or of a part of it, that is no number or no text, though it has to be.

    Parts without numbers of their own hold them by name (offsets), or texts (upstream, roles).
    """
    if isinstance(record, ClockRecord):
        _check_values(record, "offsets", record.offsets.values(), float)
        _check_values(record, "errors", record.errors.values(), float)
        return
    _check_part(record, record, "")
    if isinstance(record, TaskSpan):
        _check_values(record, "upstream", record.upstream, str)
        _check_values(record, "submitted", [record.submitted] if record.submitted is not None else [], float)
        for name in ("waits", "dispatch", "collect"):
            _check_part(record, getattr(record, name), f"{name}.")
        for place, rank in enumerate(record.ranks):
            _check_part(record, rank, f"ranks.{place}.")
    elif isinstance(record, RunRecord):
        for name, table in (("roles", record.roles), ("colocate", record.colocate)):
            _check_values(record, name, table.values() if isinstance(table, dict) else [table], str)
        for name, pool in record.pools.items():
            _check_part(record, pool, f"pools.{name}.")


def _check_part(record: Record, part: Any, prefix: str) -> None:
    kind = type(part)
    for name in _NUMBERS[kind]:
        value = getattr(part, name)
        is_number = type(value) is int or (type(value) is float and name not in _WHOLE)
        if not (is_number and -_LARGEST < value < _LARGEST):
            raise _wrong(record, prefix + name, value, int if name in _WHOLE else float)
    for name in _TEXTS[kind]:
        if type(getattr(part, name)) is not str:
            raise _wrong(record, prefix + name, getattr(part, name), str)


def _check_values(record: Record, name: str, values: Iterable[object], kind: type) -> None:
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
        if not (is_number if kind is float else isinstance(value, kind)):
            raise _wrong(record, name, value, kind)


def _wrong(record: Record, name: str, value: object, kind: type) -> ValueError:
    what = {int: "a whole number", float: "a finite number", str: "a text"}[kind]
    return ValueError(f"{record.RECORD} record: {name} is {value!r:.60}; it is {what}")
