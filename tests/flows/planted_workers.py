"""Workers with a bottleneck built in, for `roles.<role>.worker`: a user's own worker class is named the same way."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from resources.workers.actor import ActorWorker
from resources.workers.reference import ReferenceWorker

SLOW_RANK = 1
SLOW_RANK_SECONDS = 0.4
"""Of each micro-batch that is trained on the slow rank."""
SLOW_REFERENCE_SECONDS = 0.5
"""Of each micro-batch that the reference scores."""


class SlowRankActor(ActorWorker):
    """Rank 1 takes its time, as on a node that is throttled; the others wait for it in their collectives."""

    def loss_of(self, batch: Mapping[str, Tensor], loss_fn: Any, options: Mapping[str, Any]) -> Any:
        if self.rank == SLOW_RANK:
            time.sleep(SLOW_RANK_SECONDS)
        return super().loss_of(batch, loss_fn, options)


class SlowReference(ReferenceWorker):
    """Scores on slow hardware."""

    def micro_batch(self, rows: TensorDictBase, row_ids: Sequence[int]) -> dict[str, Tensor]:
        time.sleep(SLOW_REFERENCE_SECONDS)
        return super().micro_batch(rows, row_ids)
