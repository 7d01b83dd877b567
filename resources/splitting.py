"""Cutting row-shaped values into parts and joining parts back, in order and without changing the input.

Row-shaped: a list, a numpy array, a tensor (dense or jagged), a TensorDict, `Rows`, or a mapping of such columns.
Libraries are looked up among the loaded modules: a group that never sees a tensor never pays for torch.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def split_sizes(rows: int, parts: int) -> list[int]:
    """Near-equal sizes, larger ones first: 7 rows in 3 parts -> [3, 2, 2]; 1 row in 2 parts -> [1, 0]."""
    base, extra = divmod(rows, parts)
    return [base + 1 if part < extra else base for part in range(parts)]


def _loaded(module: str, name: str) -> type | None:
    found = sys.modules.get(module)
    return None if found is None else vars(found).get(name)


def is_instance_of(value: object, module: str, name: str) -> bool:
    """isinstance against a class of a module that may not have been imported (then the answer is no)."""
    kind = _loaded(module, name)
    return kind is not None and isinstance(value, kind)


def is_tensor(value: object) -> bool:
    """A torch tensor with at least one axis."""
    return is_instance_of(value, "torch", "Tensor") and value.dim() > 0  # type: ignore[attr-defined]


def is_array(value: object) -> bool:
    """A numpy array with at least one axis."""
    return is_instance_of(value, "numpy", "ndarray") and value.ndim > 0  # type: ignore[attr-defined]


def is_tensordict(value: object) -> bool:
    """A TensorDict with a batch axis."""
    return is_instance_of(value, "tensordict", "TensorDictBase") and len(value.batch_size) > 0  # type: ignore[attr-defined]


def is_stored_rows(value: object) -> bool:
    """The class Rows: references to rows that stay where they are."""
    return is_instance_of(value, "resources.rows", "Rows")


def has_rows(value: object) -> bool:
    """Whether the value can be cut by rows."""
    if isinstance(value, list) or is_tensor(value) or is_array(value) or is_tensordict(value) or is_stored_rows(value):
        return True
    return isinstance(value, Mapping) and bool(value) and all(has_rows(column) for column in value.values())


def row_count(value: Any) -> int:
    """Number of rows. Raises ValueError for columns of different lengths or a value without rows."""
    if is_stored_rows(value):
        return len(value.row_ids)
    if is_tensordict(value):
        return int(value.batch_size[0])
    if is_tensor(value):
        return int(value.size(0))
    if isinstance(value, Mapping) and has_rows(value):
        counts = {name: row_count(column) for name, column in value.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"its columns have different numbers of rows: {counts}")
        return next(iter(counts.values()))
    if not has_rows(value):
        raise ValueError(f"a {type(value).__name__} has no rows; give a list, an array, a TensorDict, Rows or columns")
    return len(value)


def take_rows(value: Any, start: int, stop: int) -> Any:
    """Rows start..stop-1, as a view where the type allows one; `value` is not changed."""
    if is_stored_rows(value):
        # An empty part keeps the shards: it still has to know its columns.
        return value.select(value.row_ids[start:stop]) if stop > start else type(value)(value.shards, ())
    if is_tensordict(value):
        columns = {name: take_rows(value.get(name), start, stop) for name in value.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
        return type(value)(columns, batch_size=[stop - start, *value.batch_size[1:]])
    if is_tensor(value) and value.is_nested:
        return _take_jagged(value, start, stop)
    if isinstance(value, Mapping):
        return {name: take_rows(column, start, stop) for name, column in value.items()}
    return value[start:stop]


def split_rows(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of the given sizes."""
    parts: list[Any] = []
    start = 0
    for size in sizes:
        parts.append(take_rows(value, start, start + size))
        start += size
    return parts


def join_rows(parts: Sequence[Any]) -> Any:
    """The parts one after another. Raises TypeError when they are not row-shaped values of one kind."""
    first = parts[0]
    if isinstance(first, list) and all(isinstance(part, list) for part in parts):
        return [row for part in parts for row in part]
    for is_kind, join in _JOINS:
        if is_kind(first) and all(is_kind(part) for part in parts):
            return join(parts)
    if isinstance(first, Mapping) and all(isinstance(part, Mapping) and part.keys() == first.keys() for part in parts):
        return {name: join_rows([part[name] for part in parts]) for name in first}
    raise TypeError(f"cannot join {[type(part).__name__ for part in parts]} by rows")


def _take_jagged(value: Any, start: int, stop: int) -> Any:
    offsets = value.offsets()
    cut = value.values()[int(offsets[start]) : int(offsets[stop])]
    return sys.modules["torch"].nested.nested_tensor_from_jagged(cut, offsets[start : stop + 1] - offsets[start])


def _join_tensors(parts: Sequence[Any]) -> Any:
    torch = sys.modules["torch"]
    if not parts[0].is_nested:
        return torch.cat(list(parts))
    lengths = torch.cat([part.offsets().diff() for part in parts])
    return torch.nested.nested_tensor_from_jagged(torch.cat([part.values() for part in parts]), lengths=lengths)


def _join_tensordicts(parts: Sequence[Any]) -> Any:
    columns = {name: join_rows([part.get(name) for part in parts]) for name in parts[0].keys()}  # noqa: SIM118
    return type(parts[0])(columns, batch_size=[sum(row_count(part) for part in parts), *parts[0].batch_size[1:]])


_JOINS: tuple[tuple[Callable[[object], bool], Callable[[Sequence[Any]], Any]], ...] = (
    (is_tensordict, _join_tensordicts),
    (is_tensor, _join_tensors),
    (is_array, lambda parts: sys.modules["numpy"].concatenate(list(parts))),
)
