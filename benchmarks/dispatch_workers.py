"""Workers of the dispatch benchmark; `EmptyWorker` keeps torch out of its process."""

import sys
from typing import Any

from resources.dispatch import Dispatch, dispatch


class EmptyWorker:
    """Does nothing, so that only the call is measured."""

    @dispatch(Dispatch.BROADCAST)
    def nothing(self) -> None:
        return None

    @dispatch(Dispatch.BROADCAST)
    def has_torch(self) -> bool:
        return "torch" in sys.modules


class ColumnWorker:
    """Answers rows with one float32 column, as a critic does."""

    @dispatch(Dispatch.SPLIT_ROWS)
    def values(self, rows: Any) -> Any:
        """rows: TensorDict [B] of int64 columns [B, T] -> TensorDict [B] with `values` [B, T] float32."""
        import torch
        from tensordict import TensorDict

        return TensorDict({"values": torch.ones(rows["input_ids"].shape)}, batch_size=rows.batch_size)

    @dispatch(Dispatch.SPLIT_ROWS, bulk=True, read_only=True)
    def stored_values(self, rows: Any) -> Any:
        """As `values`, with the answer left in the store."""
        return {"rows": int(rows.batch_size[0])}, self.values(rows)

    @dispatch(Dispatch.PER_RANK, bulk=True, read_only=True)
    def values_of_shard(self, rows: Any) -> Any:
        """As `values`, on the shard each rank is given by reference."""
        return {"rows": int(rows.batch_size[0])}, self.values(rows)
