"""AdamW with warm-up and schedules, clipping by the global norm, and no step on a gradient that is not finite.

State lies beside the parameters, cut over the ranks as they are, and the update runs on the local parts: one fused
kernel a rank. Weight decay acts on matrices, not on norms and biases.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from configs.model import OptimizerConfig
from resources.models.sharding import CommunicationClock, local_part, replicas, shard_like


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Rate of optimizer step `step` (0 is the first): linear warm-up, then constant, linear or cosine down to 0.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    >>> [learning_rate(config, step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    return config.lr * (1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What became of one optimizer step; the same on every rank."""

    grad_norm: float
    """Before clipping."""
    learning_rate: float
    was_skipped: bool


class RoleOptimizer:
    """AdamW over the trainable parameters of one role."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        world_size: int = 1,
        clock: CommunicationClock | None = None,
    ) -> None:
        self.config = config
        self.clock = CommunicationClock() if clock is None else clock
        self.world_size = world_size
        self.steps = 0
        """Optimizer steps taken; skipped ones do not count."""
        self.skipped_steps = 0
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        if not self.parameters:
            raise ValueError(
                "no parameter is trainable; an optimizer over nothing would report steps that change nothing"
            )
        self.exp_avg = {name: torch.zeros_like(local_part(p)) for name, p in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(local_part(p)) for name, p in self.parameters.items()}

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The 2-norm of the whole gradient, over all parameters and ranks; a collective."""
        device = next(iter(self.exp_avg.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                total += _squares(parameter.grad) / replicas(parameter, self.world_size)
        if self.world_size > 1:
            with self.clock:
                dist.all_reduce(total)
        return math.sqrt(float(total)) if float(total) >= 0.0 else math.nan

    @torch.no_grad()
    def step(self, grad_norm: float | None = None) -> StepOutcome:
        """Clip and step. A norm that is not finite changes nothing but `skipped_steps`, on every rank alike."""
        norm = self.grad_norm() if grad_norm is None else grad_norm
        rate = learning_rate(self.config, self.steps)
        if not math.isfinite(norm):
            self.skipped_steps += 1
            self.zero_grad()
            return StepOutcome(grad_norm=norm, learning_rate=rate, was_skipped=True)
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-12))
        for decays in (True, False):
            names = [name for name, p in self.parameters.items() if p.grad is not None and (p.dim() > 1) == decays]
            self._step_group(names, rate, scale, decays)
        self.steps += 1
        self.zero_grad()
        return StepOutcome(grad_norm=norm, learning_rate=rate, was_skipped=False)

    def _step_group(self, names: list[str], rate: float, scale: float, decays: bool) -> None:
        if not names:
            return
        gradients = [local_part(_gradient(self.parameters[name])) for name in names]
        beta1, beta2 = self.config.betas
        weights = [local_part(self.parameters[name].detach()) for name in names]
        adamw(
            weights,
            gradients,
            [self.exp_avg[name] for name in names],
            [self.exp_avg_sq[name] for name in names],
            [],
            [torch.tensor(float(self.steps), device=gradients[0].device) for _ in names],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=self.config.weight_decay if decays else 0.0,
            eps=self.config.eps,
            maximize=False,
            # Clips in the same pass; it divides by this.
            grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=gradients[0].device),
        )
        increment_version(weights)  # the fused kernel does not, and kept copies of the weights go by it

    def tensors(self) -> dict[str, Tensor]:
        """The moments under names made from the parameters', cut over the ranks like them; load into them in place."""
        named: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            named[f"optimizer.exp_avg.{name}"] = shard_like(self.exp_avg[name], parameter)
            named[f"optimizer.exp_avg_sq.{name}"] = shard_like(self.exp_avg_sq[name], parameter)
        return named

    def scalars(self) -> dict[str, int]:
        """The counters, as JSON."""
        return {"optimizer_steps": self.steps, "optimizer_skipped_steps": self.skipped_steps}

    def load_scalars(self, scalars: dict[str, int]) -> None:
        """Set the counters; warm-up and bias correction go on from there."""
        self.steps = int(scalars["optimizer_steps"])
        self.skipped_steps = int(scalars["optimizer_skipped_steps"])

    def move_to(self, device: torch.device, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take the moments to another device, after the parameters (which may be new objects now) went there."""
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.exp_avg = {name: tensor.to(device) for name, tensor in self.exp_avg.items()}
        self.exp_avg_sq = {name: tensor.to(device) for name, tensor in self.exp_avg_sq.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _squares(gradient: Tensor) -> Tensor:
    # vector_norm accumulates as it goes; squaring first would need a copy of the gradient.
    return torch.linalg.vector_norm(local_part(gradient).float()).double().square()
