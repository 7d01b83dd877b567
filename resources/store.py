"""The batch table inside a task host: batch id -> columns -> shards by reference, and the steps that still read them.

There is no store process: the host of the pool whose workers returned a column owns its references, and a column
goes when its last reader is done. Handles are plain (pool, batch id) and are resolved through the host of that pool.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from resources.rows import Rows, ShardRef

POLL_SECONDS = 0.02
"""Between two looks for a column that another step is still making."""
PEER_DEADLINE_SECONDS = 30.0
"""Longest a table of another pool may take to answer; it only looks something up."""
IDENTITY_COLUMNS = frozenset({"row_ids", "group_ids"})
"""Stand in every shard, so they have no single owner and no readers of their own."""


class StoreError(LookupError):
    """A batch or a column that the table does not hold: which, and what it holds instead."""


@dataclass(frozen=True, kw_only=True)
class BatchHandle:
    """Names a batch in the table of one pool. It crosses task and flow borders as two strings.

    >>> BatchHandle.from_json(BatchHandle(pool="main", batch_id="0042-1").to_json())
    BatchHandle(pool='main', batch_id='0042-1')
    """

    pool: str
    batch_id: str

    def to_json(self) -> dict[str, str]:
        return {"pool": self.pool, "batch_id": self.batch_id}

    @classmethod
    def from_json(cls, record: Mapping[str, str]) -> "BatchHandle":
        return cls(pool=record["pool"], batch_id=record["batch_id"])


@dataclass(slots=True)
class _Batch:
    shards: list[ShardRef] = field(default_factory=list)
    readers: dict[str, set[str]] = field(default_factory=dict)
    """Column -> steps that still have to read it."""
    endless: set[str] = field(default_factory=set)
    """Columns that no step declares to read; they stay until the batch is dropped."""
    row_ids: frozenset[int] = frozenset()


class BatchStore:
    """One pool's table. All methods may be called from any thread of the host."""

    def __init__(self, pool: str, readers: Mapping[str, Iterable[str]] | None = None, incarnation: int = 1) -> None:
        """`readers`: column -> names of the steps that read it in each iteration."""
        self.pool = pool
        self.incarnation = incarnation
        self._readers = {column: frozenset(steps) for column, steps in (readers or {}).items()}
        self._batches: dict[str, _Batch] = {}
        self._lock = threading.Lock()

    def add(self, batch_id: str, shards: Sequence[ShardRef]) -> BatchHandle:
        """Add the columns of `shards` (all of one writer) to the batch.

        Raises StoreError when a column has a writer already, or when the shards do not hold exactly the rows that
        the batch has here: a batch only grows, and it grows by whole columns.
        """
        held: dict[str, list[int]] = {}
        for shard in shards:
            for column in set(shard.columns) - IDENTITY_COLUMNS:
                held.setdefault(column, []).extend(shard.row_ids)
        with self._lock:
            batch = self._batches.setdefault(batch_id, _Batch())
            known = {column for shard in batch.shards for column in shard.columns}
            for column, row_ids in held.items():
                if column in known:
                    raise StoreError(
                        f"column {column!r} of batch {batch_id!r} is in pool {self.pool!r} already; it has one writer"
                    )
                self._check_rows(batch, batch_id, column, row_ids)
            batch.row_ids = batch.row_ids or frozenset(next(iter(held.values()), ()))
            batch.shards.extend(shards)
            for column in held:
                if self._readers.get(column):
                    batch.readers[column] = set(self._readers[column])
                else:
                    batch.endless.add(column)
        return BatchHandle(pool=self.pool, batch_id=batch_id)

    def _check_rows(self, batch: _Batch, batch_id: str, column: str, row_ids: list[int]) -> None:
        if len(set(row_ids)) != len(row_ids):
            twice = sorted({row for row in row_ids if row_ids.count(row) > 1})[:8]
            raise StoreError(f"rows {twice} of column {column!r} in batch {batch_id!r} stand in two shards")
        if batch.row_ids and frozenset(row_ids) != batch.row_ids:
            missing, extra = sorted(batch.row_ids - set(row_ids))[:8], sorted(set(row_ids) - batch.row_ids)[:8]
            raise StoreError(
                f"column {column!r} of batch {batch_id!r} lacks rows {missing} and has unknown rows {extra}"
            )

    def columns(self, batch_id: str) -> tuple[str, ...]:
        """Columns that are here now; empty for a batch that is not."""
        with self._lock:
            batch = self._batches.get(batch_id)
            return tuple(sorted({*batch.readers, *batch.endless})) if batch else ()

    def row_ids(self, batch_id: str) -> tuple[int, ...]:
        """Rows of the batch, ascending. Raises StoreError for a batch that is not here."""
        with self._lock:
            return tuple(sorted(self._batch(batch_id).row_ids))

    def shards(self, batch_id: str, columns: Iterable[str]) -> list[ShardRef]:
        """The shards that hold any of `columns`. Raises StoreError for a batch that is not here."""
        wanted = set(columns)
        with self._lock:
            return [shard for shard in self._batch(batch_id).shards if wanted.intersection(shard.columns)]

    def lookup(self, batch_id: str, columns: Sequence[str]) -> tuple[tuple[str, ...], list[ShardRef], tuple[int, ...]]:
        """(columns here, shards that hold any of `columns`, row ids ascending); empty when the batch is not here."""
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is None:
                return (), [], ()
            shards = [shard for shard in batch.shards if set(columns).intersection(shard.columns)]
            return tuple(sorted({*batch.readers, *batch.endless})), shards, tuple(sorted(batch.row_ids))

    def release(self, batch_id: str, step: str) -> None:
        """`step` is done with the batch: a column without a reader left goes, and a shard with its last column.

        Saying it twice, or for a batch that is gone, does nothing.
        """
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is None:
                return
            for column in list(batch.readers):
                batch.readers[column].discard(step)
                if not batch.readers[column]:
                    del batch.readers[column]
            alive = batch.readers.keys() | batch.endless
            batch.shards = [shard for shard in batch.shards if alive.intersection(shard.columns)]
            if not batch.shards:
                del self._batches[batch_id]

    def drop(self, batch_id: str) -> None:
        """Forget the batch, read or not: it is finished, or its iteration failed."""
        with self._lock:
            self._batches.pop(batch_id, None)

    def batch_ids(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._batches))

    def _batch(self, batch_id: str) -> _Batch:
        batch = self._batches.get(batch_id)
        if batch is None:
            raise StoreError(
                f"batch {batch_id!r} is not in pool {self.pool!r} (incarnation {self.incarnation} of its task host,"
                f" which holds {sorted(self._batches)}): it was read to its end, dropped,"
                " or lost with an earlier task host"
            )
        return batch


class StoreView:
    """What a step sees: the table of its own pool and, through their hosts, those of the others."""

    def __init__(self, own: BatchStore, peers: Mapping[str, Any] | None = None) -> None:
        """`peers`: pool -> Ray actor handle of its task host (methods `lookup`, `release`)."""
        self.own = own
        self.peers = dict(peers or {})

    def rows(self, handles: Sequence[BatchHandle], columns: Sequence[str], wait_seconds: float = 0.0) -> Rows:
        """`columns` of the batch that `handles` name, by reference: nothing is fetched.

        All handles must name one batch; its columns may lie in the tables of several pools. Waits up to
        `wait_seconds` for columns that are still being made. Raises StoreError naming what is missing.
        """
        batch_id = single_batch(handles)
        pools = sorted({handle.pool for handle in handles})
        end = time.monotonic() + wait_seconds
        while True:
            present, shards, row_ids = self._gather(pools, batch_id, columns)
            missing = sorted(set(columns) - present - IDENTITY_COLUMNS)
            if not missing:
                return Rows(shards, row_ids)
            if time.monotonic() >= end:
                raise StoreError(
                    f"columns {missing} of batch {batch_id!r} are in none of the pools {pools},"
                    f" which hold {sorted(present)}"
                )
            time.sleep(POLL_SECONDS)

    def release(self, handles: Iterable[BatchHandle], step: str) -> None:
        """Tell every table that `step` has read what it declared."""
        for pool, batch_id in {(handle.pool, handle.batch_id) for handle in handles}:
            if pool == self.own.pool:
                self.own.release(batch_id, step)
            else:
                self._peer(pool).release.remote(batch_id, step)

    def _gather(
        self, pools: list[str], batch_id: str, columns: Sequence[str]
    ) -> tuple[set[str], list[ShardRef], Sequence[int]]:
        present: set[str] = set()
        shards: list[ShardRef] = []
        row_ids: Sequence[int] = ()
        asked = {
            pool: self._peer(pool).lookup.remote(batch_id, list(columns)) for pool in pools if pool != self.own.pool
        }
        for pool in pools:
            if pool == self.own.pool:
                there, found, rows = self.own.lookup(batch_id, columns)
            else:
                there, found, rows = ray.get(asked[pool], timeout=PEER_DEADLINE_SECONDS)
            present.update(there)
            shards.extend(found)
            row_ids = row_ids or rows
        return present, shards, row_ids

    def _peer(self, pool: str) -> Any:
        if pool not in self.peers:
            raise StoreError(f"pool {pool!r} has no task host; there are {sorted({self.own.pool, *self.peers})}")
        return self.peers[pool]


def single_batch(handles: Sequence[BatchHandle]) -> str:
    """The batch id that all handles share. Raises StoreError when there is none or more than one."""
    names = {handle.batch_id for handle in handles}
    if len(names) != 1:
        raise StoreError(f"handles name {sorted(names) or 'no batch'}; a step reads exactly one batch")
    return names.pop()
