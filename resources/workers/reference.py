"""The reference: scores responses under a policy that does not learn."""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import build_causal_lm
from resources.models.policy import PolicyModel
from resources.models.weights import load_whole_tensors
from resources.workers.actor import score_rows
from resources.workers.base import ModelWorker, Status


class ReferenceWorker(ModelWorker):
    """Holds the frozen policy in the arithmetic's dtype: no master weights, no optimizer."""

    role = "reference"
    column = "ref_log_probs"

    def __init__(self, model: ModelConfig, settings: TrainedRoleConfig, seed: int, **options: Any) -> None:
        super().__init__(model.model_copy(update={"lora": None}), settings, seed, **options)
        lm = build_causal_lm(model, seed).requires_grad_(False)
        self.module = PolicyModel(lm, settings.log_prob_chunk_tokens)
        self.lay_out(self.module, is_trained=False)

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def score(self, rows: TensorDictBase, temperature: float = 1.0) -> tuple[Status, TensorDict]:
        """Log-probs of the sampled tokens: status, and a shard with `ref_log_probs` (0 outside `response_mask`)."""
        return score_rows(self, self.module, rows, temperature, {self.column: 0})

    def refresh(self, named: Iterable[tuple[str, Tensor]]) -> int:
        """Take over the weights of the actor, as its `export_weights` names them. Returns the number of tensors.

        Raises ValueError when a name is missing: half an old and half a new reference would be no policy at all.
        """
        expected = [name for name, _ in self.module.lm.named_parameters()]
        load_whole_tensors(self.module.lm, named, expected)
        return len(expected)

    @dispatch(Dispatch.BROADCAST)
    def offload(self) -> None:
        """Weights to host memory."""
        self.module.to(torch.device("cpu"))

    @dispatch(Dispatch.BROADCAST)
    def onload(self) -> None:
        """Weights back to the device."""
        self.module.to(self.device)
