"""A worker whose weights change: the optimizer step shared by actor and critic, and its state.

One mini-batch is one step. The losses of its micro-batches are shares that add up, gradients are summed over micro-
batches and ranks, and every decision (skip, stop early, refuse) is taken from numbers all ranks have in common.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.dispatch import Dispatch, dispatch
from resources.models.optimizers import RoleOptimizer
from resources.models.sharding import drop_copies, release_gathered, set_gradient_sync
from resources.models.tensor_parallel import sum_partial_gradients
from resources.seeding import stream_seed
from resources.update_plan import MiniBatch, UpdatePlan
from resources.workers.base import Status, Stopwatch, fill_of
from resources.workers.keeps_state import KeepsState
from resources.workers.metric_sums import MetricSums

Movement = Tensor
"""[sum of approximate KL, sum of |log ratio|, trained tokens, max |log ratio| / (1 + |old log-prob|)], float64."""


class RatioError(RuntimeError):
    """Log-probs before the first step are not those recorded: scoring and training see different distributions."""


class TrainedWorker(KeepsState):
    """Base of actor and critic. A subclass gives `loss_of`."""

    def __init__(self, model: ModelConfig, settings: TrainedRoleConfig, seed: int, **options: Any) -> None:
        super().__init__(model, settings, seed, **options)
        self.module = self.build_module()
        self.partial_gradients = self.lay_out(self.module, is_trained=True)
        self.optimizer = RoleOptimizer(self.parameters(), settings.optimizer, self.world_size, self.clock)
        self.is_offloaded = False
        torch.manual_seed(stream_seed(seed, self.role, self.rank))  # else every process begins somewhere else

    @abstractmethod
    def build_module(self) -> nn.Module:
        """The whole model on the CPU, float32."""

    @abstractmethod
    def loss_of(
        self, batch: Mapping[str, Tensor], loss_fn: Any, options: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor], Movement | None]:
        """Forward pass of one micro-batch: its share of the loss, metrics as sums, and how far the policy moved."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they are saved by."""
        yield from self.module.named_parameters()

    def run_update(self, rows: TensorDictBase, plan: UpdatePlan, loss_fn: Any, options: Mapping[str, Any]) -> Status:
        """Take the optimizer steps of `plan`; metrics are sums and counts that add up over ranks."""
        watch, sums = self.stopwatch(), MetricSums(self.role, is_first=self.layout.at.dp == 0)
        self.module.train()
        before = self.module.tokens_computed
        taken, skipped = self.optimizer.steps, self.optimizer.skipped_steps
        index = -1
        for index, mini in enumerate(plan.mini_batches):
            try:
                moved = self._accumulate(rows, mini, loss_fn, options, watch, sums)
            finally:
                release_gathered(self.module)
            moved = self._agree(moved)
            if moved is not None and index == 0:
                self._check_first_ratio(moved, plan.first_ratio_tolerance)
            if (
                moved is not None
                and plan.target_kl is not None
                and float(moved[0] / moved[2].clamp(min=1)) > plan.target_kl
            ):
                self.optimizer.zero_grad()
                sums.add_common({"early_stops": 1.0})
                break
            drop_copies(self.module)
            with watch.phase("optimizer"):
                outcome = self.optimizer.step(self._grad_norm())
            sums.add_step(outcome)
        sums.add_common({"masked_rows": float(plan.num_masked_rows)})
        watch.facts |= {
            "optimizer_steps": self.optimizer.steps - taken,
            "nonfinite_steps": self.optimizer.skipped_steps - skipped,
        }
        self._note_work(rows, plan.mini_batches[: index + 1], watch, self.module.tokens_computed - before)
        # Tensor- and sequence-parallel peers have seen the same rows; one of them speaks for all.
        speaks = self.layout.mesh.is_collecting(self.rank, self.world_size)
        return {"metrics": sums.numbers() if speaks else {}, "spans": watch.spans()}

    def _accumulate(
        self,
        rows: TensorDictBase,
        mini: MiniBatch,
        loss_fn: Any,
        options: Mapping[str, Any],
        watch: Stopwatch,
        sums: MetricSums,
    ) -> Movement | None:
        """Gradients of one mini-batch; returns how far the policy moved."""
        moved: Movement | None = None
        for index, row_ids in enumerate(mini.micro_batches):
            set_gradient_sync(self.module, is_last=index == len(mini.micro_batches) - 1)
            batch = self.micro_batch(rows, row_ids)
            batch["num_response_tokens"] = torch.tensor(float(mini.num_response_tokens), device=self.device)
            batch["num_sequences"] = torch.tensor(float(mini.num_sequences), device=self.device)
            with watch.phase("forward"):
                loss, metrics, movement = self.loss_of(batch, loss_fn, options)
            with watch.phase("backward"):
                loss.backward()
            if movement is not None:
                moved = movement if moved is None else _merge(moved, movement)
            if row_ids:
                sums.add(metrics)
            else:
                sums.add({f"{self.role}/padding_micro_batches": torch.ones(())})
        return moved

    def _agree(self, moved: Movement | None) -> Movement | None:
        """The movement over all data-parallel ranks: sums added, the maximum compared."""
        if moved is None:
            return None
        top = self.sum_over_ranks(moved[3:].clone(), op=dist.ReduceOp.MAX)
        return torch.cat([self.sum_over_ranks(moved[:3].clone()), top])

    def _check_first_ratio(self, moved: Movement, tolerance: float | None) -> None:
        if tolerance is None or float(moved[2]) == 0.0:
            return
        exact = self.model_config.dtype == "float32"
        seen = float(moved[3]) if exact else float(moved[1] / moved[2])
        if not seen <= tolerance:
            self.optimizer.zero_grad()
            raise RatioError(
                f"{self.role}: before the first optimizer step log_probs differ from old_log_probs by {seen:.3g} "
                f"({'max, relative' if exact else 'mean'}), and {tolerance:g} is the most that rounding explains: "
                "weights, temperature or alignment differ between scoring and update. Recompute old_log_probs with "
                "this actor, or plan the update without first_ratio_tolerance"
            )

    def _grad_norm(self) -> float:
        if self.partial_gradients:
            parameters = dict(self.module.named_parameters())
            with self.clock:
                sum_partial_gradients(parameters, self.partial_gradients, self.layout.group("tp"))
        return self.optimizer.grad_norm()

    def _note_work(self, rows: TensorDictBase, done: Sequence[MiniBatch], watch: Stopwatch, computed: int) -> None:
        """Of the mini-batches that were run, the one included at which the update stopped early."""
        lengths = dict(zip(rows["row_ids"].tolist(), rows.get("input_ids").offsets().diff().tolist(), strict=True))
        passes = [ids for mini in done for ids in mini.micro_batches]
        tokens = sum(lengths[row] for ids in passes for row in ids)
        watch.facts |= {
            "rows": sum(len(ids) for ids in passes),
            "tokens": tokens,
            "micro_batches": len(passes),
            "passes": sum(len(ids) for ids in passes) / max(1, len(lengths)),
            "micro_batch_fill": fill_of(tokens, computed),
        }
        self.note_flops(watch, [lengths[row] for ids in passes for row in ids], is_training=True)

    def state(self) -> dict[str, Any]:
        """`tensors` (cut ones as DTensors; loading may write into them in place) and JSON `scalars`.

        Frozen weights are not part of it: beside adapters they are what the configuration says.
        """
        # Detached, and no `.data`: a write in place is then seen by whoever holds a copy in another dtype.
        trained = ((name, one) for name, one in self.parameters() if one.requires_grad)
        tensors = {f"model.{name}": one.detach() for name, one in trained}
        tensors |= self.optimizer.tensors()
        tensors["rank.rng"] = torch.get_rng_state()
        return {"tensors": tensors, "scalars": self.optimizer.scalars()}

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """The optimizer's numbers come back with its tensors; gradients of what was before go."""
        self.optimizer.load_scalars(dict(scalars))
        self.optimizer.zero_grad()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A block that computes: with `offload` the state comes to the device for it, and leaves it afterwards."""
        if self.is_offloaded:
            self.onload()
        try:
            yield
        finally:
            if self.settings.offload:
                self.offload()

    @dispatch(Dispatch.BROADCAST)
    def offload(self) -> None:
        """Weights and optimizer state to host memory; gradients go."""
        self._move(torch.device("cpu"))
        self.is_offloaded = True

    @dispatch(Dispatch.BROADCAST)
    def onload(self) -> None:
        """Weights and optimizer state back to the device."""
        self._move(self.device)
        self.is_offloaded = False

    def _move(self, device: torch.device) -> None:
        self.optimizer.zero_grad()
        self.module.to(device)
        self.optimizer.move_to(device, self.parameters())


def _merge(left: Movement, right: Movement) -> Movement:
    return torch.cat([left[:3] + right[:3], torch.maximum(left[3:], right[3:])])


def movement_of(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Movement:
    """How far `log_probs` [B, T] are from `old_log_probs` over `mask`; see Movement."""
    log_ratio = torch.where(mask, log_probs.detach() - old_log_probs, 0.0).double()
    kl = (
        torch.expm1(log_ratio.clamp(max=math.log(1e6))) - log_ratio
    )  # Schulman's k3; bounded, one wild token must not be inf
    size = torch.where(mask, old_log_probs.abs(), 0.0).double()
    return torch.stack([kl.sum(), log_ratio.abs().sum(), mask.sum().double(), (log_ratio.abs() / (1.0 + size)).max()])
