"""A worker without a model: runs a given function on rows, on the CPU (advantages, filters, statistics)."""

import os
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from resources.dispatch import Dispatch, dispatch
from resources.models.sharding import CommunicationClock
from resources.workers.base import Status, Stopwatch, set_threads

RowsFunction = Callable[[TensorDictBase], tuple[dict[str, float], TensorDict]]
"""fn(rows) -> (metrics as sums and counts, a shard of new columns with `row_ids`)."""


class ComputeWorker:
    """Applies functions that arrive as values; it knows no algorithm."""

    role = "compute"

    def __init__(self, *, threads: int | None = None) -> None:
        set_threads(threads)
        self.rank = int(os.environ.get("RANK", "0"))

    @dispatch(Dispatch.RANK_ZERO, bulk=True)
    def apply(self, fn: RowsFunction, rows: TensorDictBase, **knobs: Any) -> tuple[Status, TensorDict]:
        """Call `fn(rows, **knobs)` on all rows together, since baselines and whitening look across rows."""
        watch = Stopwatch(self.rank, torch.device("cpu"), CommunicationClock())
        watch.facts["rows"] = int(rows.batch_size[0])
        with watch.phase("forward"), torch.no_grad():
            metrics, shard = fn(rows, **knobs)
        return {"metrics": metrics, "spans": watch.spans()}, shard
