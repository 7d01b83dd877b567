"""Workers that do next to nothing. They import neither torch nor Prefect, so that 64 of them fit a small machine."""

from typing import Any

import numpy as np

from resources.dispatch import Dispatch, dispatch

ROW_BYTES, ROWS = 2**14, 64
"""A megabyte an iteration."""


class NoopWorker:
    """Answers at once."""

    @dispatch(Dispatch.BROADCAST)
    def work(self) -> int:
        """Nothing."""
        return 1


class StoringWorker(NoopWorker):
    """Answers at once, and can leave rows in the store."""

    @dispatch(Dispatch.RANK_ZERO, bulk=True)
    def rows(self, iteration: int) -> tuple[dict[str, Any], Any]:
        """New rows, as a rollout makes them."""
        row_ids = list(range(iteration * ROWS, (iteration + 1) * ROWS))
        data = {"row_ids": np.array(row_ids), "input_ids": np.zeros((ROWS, ROW_BYTES), dtype=np.uint8)}
        return {"shard": {"row_ids": row_ids, "columns": ["input_ids", "row_ids"]}}, data
