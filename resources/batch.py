"""The rollout batch: columns of rows, ragged wherever tokens are involved, joined by row id.

A *shard* is a TensorDict of some rows and some columns. Per-row columns are `[rows]` tensors; per-token columns
are jagged nested tensors, so nothing is padded on the wire or at rest. Padding is made in one place,
`to_padded`, inside a worker's micro-batch. Whatever is read from the object store is shared memory and
immutable; everything here that selects or joins rows returns memory of its own.
"""

# torch and tensordict leave the types of `tolist`, `keys` and `get` open, which strict mode would report at every use.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

# Making a jagged tensor logs a deprecation of torch's own internals once in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class Column:
    """What one key of the batch holds."""

    dtype: torch.dtype
    kind: Literal["row", "token", "sampled", "bytes"]
    """`row`: one value a row. `token`: one value a token of prompt + response. `sampled`: one vector a token of
    `response_mask`, nothing for the others. `bytes`: free length."""
    meaning: str


COLUMNS: dict[str, Column] = {
    "row_ids": Column(dtype=torch.int64, kind="row", meaning="identity of a response, never reused in a run"),
    "group_ids": Column(dtype=torch.int64, kind="row", meaning="identity of the prompt; siblings share it"),
    "prompt_lengths": Column(dtype=torch.int64, kind="row", meaning="tokens of the prompt"),
    "response_lengths": Column(dtype=torch.int64, kind="row", meaning="tokens after the prompt, tool output included"),
    "finish_reasons": Column(dtype=torch.int8, kind="row", meaning="0 stop, 1 length, 2 abort"),
    "policy_versions": Column(dtype=torch.int64, kind="row", meaning="weight syncs the sampling engine had seen"),
    "record": Column(dtype=torch.uint8, kind="bytes", meaning="UTF-8 JSON: prompt, answer, source, index, extra"),
    "input_ids": Column(dtype=torch.int64, kind="token", meaning="prompt, then response"),
    "response_mask": Column(dtype=torch.bool, kind="token", meaning="tokens the policy sampled"),
    "train_mask": Column(dtype=torch.bool, kind="token", meaning="response_mask without unscorable rows"),
    "token_versions": Column(dtype=torch.int64, kind="token", meaning="policy version each token was sampled with"),
    "rollout_log_probs": Column(dtype=torch.float32, kind="token", meaning="as the engine sampled them"),
    "old_log_probs": Column(dtype=torch.float32, kind="token", meaning="recomputed by the actor before any update"),
    "ref_log_probs": Column(dtype=torch.float32, kind="token", meaning="of the frozen reference"),
    "teacher_log_probs": Column(dtype=torch.float32, kind="token", meaning="of the teacher"),
    "teacher_top_k_ids": Column(dtype=torch.int32, kind="sampled", meaning="the teacher's likeliest tokens, [K]"),
    "teacher_top_k_log_probs": Column(dtype=torch.float16, kind="sampled", meaning="and their log-probs, [K]"),
    "entropy": Column(dtype=torch.float32, kind="token", meaning="of the policy before the update"),
    "scores": Column(dtype=torch.float32, kind="row", meaning="reward of a response; nan where it could not be scored"),
    "grades": Column(dtype=torch.uint8, kind="bytes", meaning="UTF-8 JSON: score of each grader, null if it gave none"),
    "baseline_scores": Column(dtype=torch.float32, kind="row", meaning="score of the greedy response to the prompt"),
    "token_rewards": Column(dtype=torch.float32, kind="token", meaning="scores placed on tokens, KL penalty included"),
    "values": Column(dtype=torch.float32, kind="token", meaning="critic's value of the prefix before the token"),
    "bootstrap_values": Column(dtype=torch.float32, kind="row", meaning="critic's value of the whole row's state"),
    "advantages": Column(dtype=torch.float32, kind="token", meaning="how much better than expected"),
    "returns": Column(dtype=torch.float32, kind="token", meaning="targets of the critic"),
}
"""Every key of a batch. Token columns are aligned with `input_ids`: position t speaks of `input_ids[t]`."""


BRANCH_STRIDE = 2**40
"""Between the row ids of the branches of one rollout; far above any row id of a run."""


def rollout_ids_of(row_ids: Tensor) -> Tensor:
    """Which rollout each row [B] is a part of: its branches share the id, and have one vote in a baseline.

    >>> rollout_ids_of(torch.tensor([7, 8, 8 + BRANCH_STRIDE])).tolist()
    [7, 8, 8]
    """
    return row_ids % BRANCH_STRIDE


class BatchError(ValueError):
    """A shard that breaks a rule of the table: the first wrong key, what it is, what it should be."""


def to_ragged(padded: Tensor, lengths: Tensor) -> Tensor:
    """Drop the right padding of `padded` [B, T]: row b keeps its first `lengths[b]` values. Returns a jagged tensor."""
    if lengths.numel() != padded.shape[0]:
        raise BatchError(f"{lengths.numel()} lengths for {padded.shape[0]} rows")
    keep = torch.arange(padded.shape[1], device=padded.device)[None, :] < lengths[:, None]
    return ragged_from_values(padded[keep], lengths)


def ragged_from_values(values: Tensor, lengths: Tensor) -> Tensor:
    """Make a jagged tensor of rows with `lengths` [B] out of their concatenated `values` [sum(lengths)]."""
    if int(lengths.sum()) != values.shape[0]:
        raise BatchError(f"lengths add up to {int(lengths.sum())} but there are {values.shape[0]} values")
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values.contiguous(), offsets)


def ragged_from_rows(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Make a jagged tensor of one-dimensional `rows`; an empty row is legal."""
    lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int64)
    values = torch.cat([row.reshape(-1).to(dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)
    return ragged_from_values(values, lengths)


def row_lengths(ragged: Tensor) -> Tensor:
    """Lengths [B] of the rows of a jagged tensor."""
    return _offsets(ragged).diff()


def to_padded(ragged: Tensor, length: int | None = None, fill: float | int | bool = 0) -> Tensor:
    """Right-pad a jagged tensor to [B, T]; T is the longest row, or `length` when given (it must cover that)."""
    lengths = row_lengths(ragged)
    longest = int(lengths.max()) if lengths.numel() else 0
    width = longest if length is None else length
    if width < longest:
        raise BatchError(f"length is {width} but a row has {longest} values; padding never cuts")
    padded = torch.full((lengths.numel(), width), fill, dtype=ragged.dtype, device=ragged.device)
    keep = torch.arange(width, device=ragged.device)[None, :] < lengths[:, None]
    padded[keep] = ragged.values()
    return padded


def first_true(mask: Tensor) -> Tensor:
    """[B]: where each row of `mask` [B, T] is true for the first time; 0 where it never is.

    >>> first_true(torch.tensor([[False, False, True], [False, False, False]])).tolist()
    [2, 0]
    """
    return mask.int().argmax(dim=1) if mask.shape[1] else mask.new_zeros(mask.shape[0], dtype=torch.int64)


def columns_of(shard: TensorDictBase) -> dict[str, Tensor]:
    """The columns by name. A shard never nests, which TensorDict's own types cannot say."""
    return cast("dict[str, Tensor]", dict(shard.items()))


def make_shard(columns: dict[str, Tensor]) -> TensorDict:
    """A shard of `columns`, all with the same number of rows."""
    rows = {name: _num_rows(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise BatchError(f"columns disagree on the number of rows: {rows}")
    return TensorDict(columns, batch_size=[next(iter(rows.values()))])


def select_rows(shard: TensorDictBase, row_ids: Sequence[int] | Tensor) -> TensorDict:
    """The rows `row_ids` of `shard`, in that order, in memory of their own. Raises BatchError for a row it lacks."""
    wanted = torch.as_tensor(row_ids, dtype=torch.int64)
    return _take(shard, _positions(shard["row_ids"], wanted))


def concat_rows(shards: Sequence[TensorDictBase]) -> TensorDict:
    """The rows of all `shards`, in order; all must have the same columns."""
    if not shards:
        raise BatchError("no shard to concatenate; an empty batch still has a shard with zero rows")
    parts = [columns_of(shard) for shard in shards]
    names = sorted(parts[0])
    for part in parts:
        if sorted(part) != names:
            raise BatchError(f"shards differ in columns: {names} and {sorted(part)}")
    return make_shard({name: _concat([part[name] for part in parts]) for name in names})


def join_columns(shards: Sequence[TensorDictBase]) -> TensorDict:
    """Put columns of the same rows side by side, in the row order of the first shard.

    Identity comes from row ids, never from position. Raises BatchError when the sets of row ids differ, when a
    row id stands twice, or when a column (other than `row_ids` and `group_ids`) comes from two shards.
    """
    first = shards[0]["row_ids"]
    joined: dict[str, Tensor] = {}
    for shard in shards:
        _check_same_rows(first, shard["row_ids"])
        part = select_rows(shard, first)
        for name, column in columns_of(part).items():
            if name in joined and name not in ("row_ids", "group_ids"):
                raise BatchError(f"column {name!r} comes from two shards; a column has one writer")
            joined[name] = column
    return make_shard(joined)


def validate(shard: TensorDictBase, required: Iterable[str]) -> None:
    """Raise BatchError naming the first wrong key: missing, another dtype or shape, or not aligned."""
    columns = columns_of(shard)
    present = set(columns)
    for name in required:
        if name not in present:
            raise BatchError(f"column {name!r} is missing; the batch has {sorted(present)}")
    total = row_lengths(columns["input_ids"]) if "input_ids" in present else None
    for name in sorted(present):
        _validate_column(name, columns[name], int(shard.batch_size[0]), total)


def _validate_column(name: str, value: Tensor, rows: int, total: Tensor | None) -> None:
    column = COLUMNS.get(name)
    if column is None:
        raise BatchError(f"column {name!r} is not in the table of columns; known are {sorted(COLUMNS)}")
    if value.dtype != column.dtype:
        raise BatchError(f"column {name!r} is {value.dtype}; it should be {column.dtype}")
    if value.is_nested != (column.kind != "row"):
        raise BatchError(
            f"column {name!r} is {'ragged' if value.is_nested else 'dense'}; it should be of kind {column.kind}"
        )
    if _num_rows(value) != rows or (column.kind == "row" and value.dim() != 1):
        raise BatchError(f"column {name!r} has shape {tuple(value.shape)}; it should have {rows} rows")
    if column.kind == "token" and total is not None and not torch.equal(row_lengths(value), total):
        raise BatchError(
            f"column {name!r} has row lengths {row_lengths(value).tolist()}; input_ids has {total.tolist()}"
        )


def _num_rows(column: Tensor) -> int:
    return int(_offsets(column).numel() - 1) if column.is_nested else int(column.shape[0])


def _positions(have: Tensor, wanted: Tensor) -> Tensor:
    order = torch.argsort(have)
    ranked = have[order]
    if ranked.numel() > 1 and bool((ranked[1:] == ranked[:-1]).any()):
        twice = ranked[1:][ranked[1:] == ranked[:-1]].unique().tolist()
        raise BatchError(f"row ids {twice} stand more than once; a row id is an identity")
    slots = torch.searchsorted(ranked, wanted).clamp(max=max(0, ranked.numel() - 1))
    absent = wanted if ranked.numel() == 0 else wanted[ranked[slots] != wanted]
    if absent.numel():
        raise BatchError(f"row ids {absent.tolist()[:8]} are not in the shard, which has {have.tolist()[:8]}...")
    return order[slots]


def _check_same_rows(first: Tensor, other: Tensor) -> None:
    if first.numel() != other.numel() or not torch.equal(first.sort().values, other.sort().values):
        missing = sorted(set(first.tolist()) - set(other.tolist()))[:8]
        extra = sorted(set(other.tolist()) - set(first.tolist()))[:8]
        raise BatchError(
            f"row ids differ: missing {missing}, not asked for {extra}, {first.numel()} and {other.numel()} rows"
        )


def _take(shard: TensorDictBase, positions: Tensor) -> TensorDict:
    return TensorDict(
        {name: _take_column(column, positions) for name, column in columns_of(shard).items()},
        batch_size=[positions.numel()],
    )


def _take_column(column: Tensor, positions: Tensor) -> Tensor:
    if not column.is_nested:
        return column.index_select(0, positions)
    offsets, values = _offsets(column), column.values()
    lengths = offsets.diff().index_select(0, positions)
    starts = offsets[:-1].index_select(0, positions)
    # Position of every kept value in `values`: its row's start plus its place in the row.
    ends = lengths.cumsum(0)
    place = torch.arange(int(lengths.sum())) - (ends - lengths).repeat_interleave(lengths)
    return ragged_from_values(values.index_select(0, starts.repeat_interleave(lengths) + place), lengths)


def _concat(columns: Sequence[Tensor]) -> Tensor:
    if not columns[0].is_nested:
        return torch.cat(list(columns))
    lengths = torch.cat([row_lengths(column) for column in columns])
    return ragged_from_values(torch.cat([column.values() for column in columns]), lengths)


def _offsets(ragged: Tensor) -> Tensor:
    """Where each row begins, and the end; a method that only jagged tensors have."""
    return cast("Tensor", cast("Any", ragged).offsets())
