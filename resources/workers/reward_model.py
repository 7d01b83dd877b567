"""The reward model: one score a response, read at its last token."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.batch import make_shard
from resources.dispatch import Dispatch, dispatch
from resources.models.value_head import SequenceScorer, load_reward_model
from resources.workers.base import ModelWorker, Status


class RewardModelWorker(ModelWorker):
    """Holds a scalar reward model of the policy's own tokens."""

    role = "reward"

    def __init__(self, model: ModelConfig, settings: TrainedRoleConfig, seed: int, **options: Any) -> None:
        super().__init__(model, settings, seed, **options)
        self.module = SequenceScorer(load_reward_model(model).requires_grad_(False))
        self.lay_out(self.module, is_trained=False)

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> tuple[Status, TensorDict]:
        """Status, and a shard with `scores` [rows] float32; nan for a row without a response."""
        watch = self.stopwatch()
        self.module.eval()
        row_ids = rows["row_ids"].tolist()
        scores = torch.full((len(row_ids),), torch.nan)
        for positions in self.scoring_batches(rows, watch):
            batch = self.micro_batch(rows, [row_ids[position] for position in positions])
            with watch.phase("forward"):
                part: Tensor = self.module(batch["input_ids"], batch["lengths"])
            has_response = batch["sampled_mask"].any(dim=1)
            if positions:
                scores[torch.tensor(positions)] = torch.where(has_response, part, torch.nan).float().cpu()
        return {"metrics": {}, "spans": watch.spans()}, make_shard(
            {"row_ids": rows["row_ids"].clone(), "scores": scores}
        )
