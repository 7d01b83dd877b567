"""Rows by reference: what a task passes to a worker instead of tensors.

Kept apart from `batch.py` so that the arithmetic of batches needs no Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from tensordict import TensorDict, TensorDictBase

from resources.batch import BatchError, concat_rows, join_columns, select_rows


@dataclass(frozen=True, slots=True)
class ShardRef:
    """Where some columns of some rows lie.

    `data` is a Ray ObjectRef of a TensorDict, or the TensorDict itself when worker and caller are one process.
    """

    data: Any
    row_ids: tuple[int, ...]
    columns: tuple[str, ...]


class Rows:
    """Some rows of a batch, by reference; a worker method that declares a `Rows` argument receives the TensorDict.

    A plain class on purpose: Prefect looks into dataclasses and containers and would fetch what it finds there.

    >>> import torch
    >>> from resources.batch import make_shard
    >>> left = make_shard({"row_ids": torch.tensor([7, 8]), "scores": torch.tensor([0.0, 1.0])})
    >>> Rows([ShardRef(left, (7, 8), ("row_ids", "scores"))], [8]).load()["scores"].tolist()
    [1.0]
    """

    __slots__ = ("row_ids", "shards")

    def __init__(self, shards: Sequence[ShardRef], row_ids: Sequence[int]) -> None:
        self.shards = tuple(shards)
        self.row_ids = tuple(row_ids)

    def __reduce__(self) -> tuple[type["Rows"], tuple[tuple[ShardRef, ...], tuple[int, ...]]]:
        return (Rows, (self.shards, self.row_ids))

    def select(self, row_ids: Sequence[int]) -> "Rows":
        """The same columns of fewer rows; shards without any of these rows are left behind.

        No rows still have columns, so then all shards stay.
        """
        wanted = set(row_ids)
        kept = [shard for shard in self.shards if wanted.intersection(shard.row_ids)] if wanted else self.shards
        return Rows(kept, row_ids)

    def load(self, columns: Sequence[str] | None = None) -> TensorDict:
        """Fetch, join by row id and select: the rows in the order of `row_ids`, in memory of the caller's own.

        Raises BatchError when a row or a column is missing, or has two sources.
        """
        wanted = set(self.row_ids)
        parts: dict[tuple[str, ...], list[TensorDictBase]] = {}
        shards = [shard for shard in self.shards if not wanted or wanted.intersection(shard.row_ids)]
        if not shards:
            raise BatchError(f"no shard holds rows {sorted(wanted)[:8]}")
        for shard, data in zip(shards, _fetch([shard.data for shard in shards]), strict=True):
            parts.setdefault(tuple(sorted(shard.columns)), []).append(data)
        joined = join_columns([select_rows(concat_rows(group), self.row_ids) for group in parts.values()])
        if columns is None:
            return joined
        missing = sorted(set(columns) - set(joined.keys()))
        if missing:
            raise BatchError(f"columns {missing} are missing; the batch has {sorted(joined.keys())}")
        return joined.select(*columns, "row_ids")


def _fetch(items: list[Any]) -> list[TensorDictBase]:
    refs = [item for item in items if isinstance(item, ray.ObjectRef)]
    fetched = iter(ray.get(refs) if refs else [])
    return [next(fetched) if isinstance(item, ray.ObjectRef) else item for item in items]
