"""The critic: estimates the value of the state before each token, and learns it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from configs.model import ModelConfig
from configs.training import CriticConfig
from resources.dispatch import Dispatch, dispatch
from resources.models.lora import add_adapters
from resources.models.value_head import ScalarModel, build_value_model
from resources.update_plan import UpdatePlan
from resources.workers.base import Status
from resources.workers.padding import collect_columns
from resources.workers.trained import Movement, TrainedWorker

CriticLoss = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""loss_fn(values [b, t], padded columns) -> (share of the loss, metrics as sums and counts)."""


class CriticWorker(TrainedWorker):
    """Holds the value model: the actor's architecture and start, unless `critic.model` names another."""

    role = "critic"
    module: ScalarModel
    settings: CriticConfig

    def __init__(self, model: ModelConfig, critic: CriticConfig, seed: int, **options: Any) -> None:
        # A critic is trained whole: an adapter on the actor says nothing about it unless its own model has one.
        own = critic.model if critic.model is not None else model.model_copy(update={"lora": None})
        super().__init__(own, critic, seed, **options)

    def build_module(self) -> nn.Module:
        scalar = build_value_model(self.model_config, self.seed, from_reward_model=self.settings.from_reward_model)
        if self.model_config.lora is not None:
            add_adapters(scalar.model, self.model_config.lora, self.seed)  # the head beside them is trained whole
        if self.model_config.gradient_checkpointing:
            scalar.model.gradient_checkpointing_enable({"use_reentrant": False})
        return scalar

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    @torch.no_grad()
    def estimate_values(self, rows: TensorDictBase, with_last: bool = False) -> tuple[Status, TensorDict]:
        """Values of the states before the tokens that follow the prompt (tool output included), 0 on the prompt.

        Returns:
            status, and a shard with `values` (ragged) and, `with_last`, `bootstrap_values` [B] of the states behind the
            last tokens.
        """
        watch = self.stopwatch()
        self.module.eval()
        row_ids = rows["row_ids"].tolist()
        parts: list[tuple[list[int], Mapping[str, Tensor]]] = []
        last = torch.zeros(len(row_ids))
        with self.on_device():
            for positions in self.scoring_batches(rows, watch):
                batch = self.micro_batch(rows, [row_ids[position] for position in positions])
                with watch.phase("forward"):
                    values, behind = self.module(batch["input_ids"], _after_prompt(batch), lengths=batch["lengths"])
                if positions:
                    parts.append((positions, {"values": values}))
                    last[torch.tensor(positions)] = behind.cpu()
        shard = collect_columns(rows, parts, ["values"])
        if with_last:
            shard["bootstrap_values"] = last
        return {"metrics": {}, "spans": watch.spans()}, shard

    @dispatch(Dispatch.PER_RANK, split=("rows", "plan"))
    def update(self, rows: TensorDictBase, plan: UpdatePlan, loss_fn: CriticLoss) -> Status:
        """Take the optimizer steps of `plan` on `rows`, which hold `values` (from before the update) and `returns`."""
        with self.on_device():
            return self.run_update(rows, plan, loss_fn, {})

    def loss_of(
        self, batch: Mapping[str, Tensor], loss_fn: CriticLoss, options: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor], Movement | None]:
        values = self.module(batch["input_ids"], _after_prompt(batch))
        loss, metrics = loss_fn(values, batch)
        return loss + 0.0 * values.sum(), metrics, None


def _after_prompt(batch: Mapping[str, Tensor]) -> Tensor:
    """Positions [B, T] of tokens after the prompt: from the first sampled token to the end of the row."""
    started = batch["sampled_mask"].cumsum(dim=1) > 0
    places = torch.arange(started.shape[1], device=started.device)[None, :]
    return started & (places < batch["lengths"][:, None]) & (places > 0)
