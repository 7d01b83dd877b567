"""Advantages, losses and a grader for tests: importable by path."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Columns = Mapping[str, Tensor]


def scaled(columns: Columns, *, gamma: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Scores over `gamma`."""
    spread = (columns["scores"] / gamma)[:, None].expand(columns["response_mask"].shape)
    return {"advantages": spread}, {"advantage/own": torch.tensor(7.0)}


def surest(columns: Columns) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Entropies as advantages: what only the actor's own pass over the responses knows."""
    return {"advantages": columns["entropy"]}, {"advantage/lowest_entropy": columns["entropy"].min()}


def narrow(columns: Columns, **settings: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One number a row."""
    return {"advantages": columns["scores"]}, {}


def broken(columns: Columns) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Not a number on every token."""
    return {"advantages": torch.full(columns["response_mask"].shape, torch.nan)}, {}


def alone(columns: Columns) -> Tensor:
    """Advantages without the dictionary around them."""
    return columns["scores"]


def demanding(columns: Columns, temperature_of_mine: float) -> None:
    """Asks for a setting that no run has."""


def pull(
    log_probs: Tensor, entropy: Tensor | None, td: Columns, *, aggregation: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantages times log-probs, over the mini-batch's tokens."""
    mask = td["response_mask"]
    share = torch.where(mask, log_probs * td["advantages"] + 0.0 * td["rollout_log_probs"], 0.0).sum()
    return -share / td["num_response_tokens"], {"actor/own": torch.tensor(float(aggregation == "token-mean"))}


def by_row(log_probs: Tensor, entropy: Tensor | None, td: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss a row."""
    return log_probs.sum(dim=1), {}


def flat(log_probs: Tensor, entropy: Tensor | None, td: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that forgot where it came from."""
    return log_probs.detach().mean(), {}


def of_a_group(responses: list[str]) -> list[float]:
    """A score for each of several responses."""
    return [1.0 for _ in responses]
