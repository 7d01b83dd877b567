"""Shards of rows for tests."""

import torch
from tensordict import TensorDict

from resources.batch import make_shard


def scored_rows(scores: list[float]) -> TensorDict:
    """Rows that hold nothing but scores."""
    return make_shard({"row_ids": torch.arange(len(scores)), "scores": torch.tensor(scores)})
