"""Metrics of one call on one rank, kept as sums and counts so that ranks and micro-batches add up to exact means."""

from collections.abc import Mapping

import torch
from torch import Tensor

from resources.models.optimizers import StepOutcome

MAX = "/max"


class MetricSums:
    """`x` is a sum, `x/count` what to divide by, `x/max` a maximum.

    What all ranks know alike (gradient norm, learning rate) is counted by the first data-parallel rank only.
    """

    def __init__(self, role: str, *, is_first: bool) -> None:
        self.role, self.is_first = role, is_first
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Sums and counts of a micro-batch; a nan sum stays visible as nan."""
        for name, value in metrics.items():
            value = value.detach().double()
            if name not in self._totals:
                self._totals[name] = value
            elif name.endswith(MAX):
                self._totals[name] = torch.maximum(self._totals[name], value)
            else:
                self._totals[name] = self._totals[name] + value

    def add_common(self, metrics: Mapping[str, float]) -> None:
        """Plain sums of the whole group, named without the role."""
        for name, value in metrics.items():
            self.add({f"{self.role}/{name}": torch.tensor(value if self.is_first else 0.0, dtype=torch.float64)})

    def add_step(self, outcome: StepOutcome) -> None:
        """An optimizer step; the norm of a skipped one is not finite and stays out of the mean."""
        self.add_common(
            {"optimizer_steps": float(not outcome.was_skipped), "skipped_steps": float(outcome.was_skipped)}
        )
        finite = not outcome.was_skipped
        self.add_common({"grad_norm": outcome.grad_norm if finite else 0.0, "grad_norm/count": float(finite)})
        self.add_common({"learning_rate": outcome.learning_rate, "learning_rate/count": 1.0})

    def numbers(self) -> dict[str, float]:
        """Plain numbers."""
        return {name: float(value) for name, value in self._totals.items()}
