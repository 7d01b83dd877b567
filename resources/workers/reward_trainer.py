"""The reward model in training: a scalar head on the policy's architecture, learnt from preference pairs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import load_tokenizer, own_config
from resources.models.lora import add_adapters, merged_tensors
from resources.models.reward_export import export_reward_model
from resources.models.value_head import SequenceScorer, build_value_model
from resources.update_plan import UpdatePlan
from resources.workers.base import Status
from resources.workers.trained import Movement, TrainedWorker

PairLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""loss_fn(preferred [p], rejected [p], padded columns) -> (share of the loss, metrics as sums and counts)."""


class RewardTrainerWorker(TrainedWorker):
    """Scores whole responses at their last token; micro-batches hold whole pairs, preferred before rejected."""

    role = "reward_model"
    module: SequenceScorer

    def build_module(self) -> nn.Module:
        scalar = build_value_model(self.model_config, self.seed)
        if self.model_config.lora is not None:
            add_adapters(scalar.model, self.model_config.lora, self.seed)  # the head beside them is trained whole
        if self.model_config.gradient_checkpointing:
            scalar.model.gradient_checkpointing_enable({"use_reentrant": False})
        return SequenceScorer(scalar)

    @dispatch(Dispatch.PER_RANK, split=("rows", "plan"))
    def update(self, rows: TensorDictBase, plan: UpdatePlan, loss_fn: PairLoss) -> Status:
        """Take the optimizer steps of `plan`, whose micro-batches name both rows of each pair."""
        return self.run_update(rows, plan, loss_fn, {})

    def loss_of(
        self, batch: Mapping[str, Tensor], loss_fn: PairLoss, options: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor], Movement | None]:
        scores = self.module(batch["input_ids"], batch["lengths"])
        if scores.shape[0] % 2:  # the stand-in of a rank without rows
            return 0.0 * scores.sum(), {}, None
        loss, metrics = loss_fn(scores[0::2], scores[1::2], batch)
        return loss + 0.0 * scores.sum(), metrics, None

    @dispatch(Dispatch.BROADCAST)
    def export(self, folder: str) -> None:
        """Write a sequence classifier with one label, adapters merged; all ranks gather, rank 0 writes."""
        scalar = self.module.scalar
        named = dict(merged_tensors(scalar))
        if self.rank == 0:
            config = own_config(self.model_config, scalar.model.config)
            export_reward_model(Path(folder), config, load_tokenizer(self.model_config), named)
