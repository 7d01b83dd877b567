"""Functions of ragged rows around the pure algorithms. They travel to workers, so nothing here imports Prefect."""

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from resources.batch import COLUMNS, make_shard, row_lengths, to_padded, to_ragged

Estimator = Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]


def padded_columns(rows: TensorDictBase, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Token columns as [B, T], row columns as [B]; byte columns stay behind."""
    wanted = rows.keys() if names is None else [*names, "row_ids"]
    padded: dict[str, Tensor] = {}
    for name in wanted:
        column = rows.get(name)
        if not column.is_nested:
            padded[name] = column
        elif name not in COLUMNS or COLUMNS[name].kind == "token":
            padded[name] = to_padded(column)
    return padded


def advantages_of_rows(rows: TensorDictBase, *, estimator: Estimator) -> tuple[dict[str, float], TensorDict]:
    """Run the estimator on the whole rollout batch; returns metrics as sums and the new ragged columns.

    Rows are put in the order of their ids first, so that sums are the same bits whichever worker, pool or
    number of ranks brought them.
    """
    order = torch.argsort(rows["row_ids"])
    padded = {name: column[order] for name, column in padded_columns(rows).items()}
    lengths = row_lengths(rows.get("response_mask"))[order]
    columns, metrics = estimator(padded)
    shard = {"row_ids": padded["row_ids"], **{name: to_ragged(column, lengths) for name, column in columns.items()}}
    return {name: float(value) for name, value in metrics.items()}, make_shard(shard)


def update_facts(rows: TensorDictBase) -> tuple[list[int], list[int], list[int]]:
    """(row ids, lengths in tokens, trained tokens), ascending by row id: what an update plan is made from."""
    order = torch.argsort(rows["row_ids"])
    mask = rows.get("train_mask")
    lengths = row_lengths(mask)
    trained = to_padded(mask).sum(dim=1)
    return rows["row_ids"][order].tolist(), lengths[order].tolist(), trained[order].tolist()
