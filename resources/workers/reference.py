"""The reference: scores responses under a policy that does not learn."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.dispatch import Dispatch, dispatch
from resources.engines.base import WeightReport, Weights, check_names
from resources.models.causal_lm import build_causal_lm
from resources.models.policy import PolicyModel
from resources.models.weights import fill
from resources.weight_receiver import ReceivesWeights
from resources.weight_sender import probe_rows
from resources.workers.actor import score_rows
from resources.workers.base import Status
from resources.workers.keeps_state import KeepsState


class ReferenceWorker(ReceivesWeights, KeepsState):
    """Holds the frozen policy in the arithmetic's dtype: no master weights, no optimizer.

    With `algorithm.kl.refresh_every` it takes over the actor's weights now and then, as an engine does, and is saved
    with the stateful roles.
    """

    role = "reference"
    column = "ref_log_probs"

    def __init__(self, model: ModelConfig, settings: TrainedRoleConfig, seed: int, **options: Any) -> None:
        super().__init__(model.model_copy(update={"lora": None}), settings, seed, **options)
        lm = build_causal_lm(model, seed).requires_grad_(False)
        self.module = PolicyModel(lm, settings.log_prob_chunk_tokens, model.share_prompts)
        self.lay_out(self.module, is_trained=False)
        self.siblings: dict[str, Any] = {}
        self.engine: Any = _FrozenPolicy(self)

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def score(self, rows: TensorDictBase, temperature: float = 1.0) -> tuple[Status, TensorDict]:
        """Log-probs of the sampled tokens: status, and a shard with `ref_log_probs` (0 outside `response_mask`)."""
        return score_rows(self, self.module, rows, temperature, {self.column: 0})

    @torch.no_grad()
    def probe_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of each token given those before it; 0.0 for the first."""
        _, scored = self.score(probe_rows(token_ids), 1.0)
        return scored.get(self.column).values().tolist()

    def state(self) -> dict[str, Any]:
        """The weights; there is nothing else."""
        return {"tensors": {f"model.{name}": one.data for name, one in self.module.named_parameters()}, "scalars": {}}

    @dispatch(Dispatch.BROADCAST)
    def offload(self) -> None:
        """Weights to host memory."""
        self.module.to(torch.device("cpu"))

    @dispatch(Dispatch.BROADCAST)
    def onload(self) -> None:
        """Weights back to the device."""
        self.module.to(self.device)


class _FrozenPolicy:
    """The reference behind the part of an engine's interface that a weight sync loads into."""

    def __init__(self, worker: ReferenceWorker) -> None:
        self._worker = worker
        self._names: list[str] = []
        self._bytes, self._started = 0, 0.0

    def begin_update(self) -> None:
        self._names, self._bytes, self._started = [], 0, time.monotonic()

    def load_weights(self, weights: Weights) -> None:
        """Cut whole tensors as the parameters lie; a tied head has no parameter of its own."""
        own = dict(self._worker.module.lm.named_parameters())
        for name, tensor in weights:
            self._names.append(name)
            if name in own:
                fill(own[name], tensor.to(own[name].dtype))
                self._bytes += tensor.nbytes

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Raises WeightMismatchError: half an old and half a new reference would be no policy at all."""
        own = [name for name, _ in self._worker.module.lm.named_parameters()]
        check_names(self._names, expected_names)
        check_names([name for name in own if name in self._names], own)
        return WeightReport(
            version=version,
            names=tuple(self._names),
            num_bytes=self._bytes,
            seconds=time.monotonic() - self._started,
        )

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return self._worker.probe_log_probs(token_ids)
