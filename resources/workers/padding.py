"""Ragged rows to the padded [B, T] of one micro-batch, and back. The only place where padding exists."""

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from resources.batch import COLUMNS, make_shard, row_lengths, to_padded, to_ragged

SAMPLED_COLUMNS = frozenset(name for name, column in COLUMNS.items() if column.kind == "sampled")


def pad_rows(rows: TensorDictBase, multiple: int = 1) -> dict[str, Tensor]:
    """Token columns as [B, T] with T the longest row (rounded up to `multiple`), row columns as [B]; bytes stay behind.

    `sampled_mask` is the batch's `response_mask`; `response_mask` becomes the mask to train on, `train_mask` where the
    batch has one.
    """
    longest = int(row_lengths(rows.get("input_ids")).max())
    width = -(-longest // multiple) * multiple
    padded: dict[str, Tensor] = {"lengths": row_lengths(rows.get("input_ids"))}
    for name in sorted(rows.keys()):
        column = rows.get(name)
        if not column.is_nested:
            padded[name] = column
        elif name not in COLUMNS or COLUMNS[name].kind == "token":
            padded[name] = to_padded(column, width)
    for name in sorted(set(rows.keys()) & SAMPLED_COLUMNS):
        padded[name] = _spread(rows.get(name), padded["response_mask"])
    return _with_masks(padded)


def _spread(column: Tensor, sampled: Tensor) -> Tensor:
    """Vectors of the sampled tokens, [N, K] in row order, to [B, T, K]; 0 elsewhere."""
    spread = torch.zeros((*sampled.shape, column.values().shape[-1]), dtype=column.dtype)
    spread[sampled] = column.values()
    return spread


def stand_in(rows: TensorDictBase, width: int) -> dict[str, Tensor]:
    """One row of padding with the columns of `rows`: it takes part in collectives and in nothing else."""
    padded = {"lengths": torch.tensor([width])}
    for name in sorted(rows.keys()):
        column = rows.get(name)
        if not column.is_nested:
            padded[name] = torch.zeros((1, *column.shape[1:]), dtype=column.dtype)
        elif name not in COLUMNS or COLUMNS[name].kind == "token":
            padded[name] = torch.zeros((1, width), dtype=column.dtype)
        elif name in SAMPLED_COLUMNS:
            padded[name] = torch.zeros((1, width, column.values().shape[-1]), dtype=column.dtype)
    return _with_masks(padded)


def _with_masks(padded: dict[str, Tensor]) -> dict[str, Tensor]:
    if "response_mask" in padded:
        padded["sampled_mask"] = padded["response_mask"]
    if "train_mask" in padded:
        padded["response_mask"] = padded["train_mask"]
    return padded


def collect_columns(
    rows: TensorDictBase, parts: list[tuple[list[int], Mapping[str, Tensor]]], names: Sequence[str]
) -> TensorDict:
    """A shard of `row_ids` and ragged columns `names`, in the row order of `rows`, from padded parts."""
    lengths = row_lengths(rows.get("input_ids"))
    width = int(lengths.max()) if lengths.numel() else 0
    columns: dict[str, Tensor] = {"row_ids": rows["row_ids"].clone()}
    for name in names:
        whole = torch.zeros(lengths.numel(), width)
        for positions, padded in parts:
            part = padded[name].detach().float().cpu()[:, :width]
            whole[torch.tensor(positions), : part.shape[1]] = part
        columns[name] = to_ragged(whole, lengths)
    return make_shard(columns)
