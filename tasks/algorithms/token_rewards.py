"""From one score per response to rewards on tokens: placement and the over-long penalty."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.algorithms.masking import zero_masked
from tasks.algorithms.numbers import Number, as_float


def last_true(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Index of the last position of each row's mask; 0 for a row that has none (pair it with `mask.any(dim=1)`)."""
    if not mask.shape[1]:
        return torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, torch.zeros_like(positions)).amax(dim=1)


def spread_scores(scores: Number[Tensor, " B"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Place each score on the last token that the policy sampled.

    The slot comes from the mask, not from a length: tool output and padding after it get nothing. A row with a nan
    score (unscorable) or without a sampled token gets nothing at all.
    """
    scores = as_float(scores)
    has_slot = response_mask.any(dim=1) & ~scores.isnan()
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype, device=scores.device)
    if not placed.numel():
        return placed
    return placed.scatter(1, last_true(response_mask)[:, None], zero_masked(scores, has_slot)[:, None])


def overlong_penalty(
    response_lengths: Int[Tensor, " B"], *, max_length: int, buffer: int, factor: float = 1.0
) -> Float[Tensor, " B"]:
    """DAPO's soft over-long punishment, to be added to the scores.

        0                                          up to max_length - buffer tokens
        factor * (max_length - buffer - n)/buffer  inside the buffer, falling linearly
        -factor                                    at max_length and beyond

    Yu et al., DAPO, arXiv 2503.14476, equation 13. Lengths in tokens.

    Raises:
        ValueError: a buffer that is not inside 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"over-long buffer is {buffer} and max_length {max_length}; the buffer must lie in 1..max_length"
        )
    overshoot = (max_length - buffer - response_lengths).float() / buffer
    return factor * overshoot.clamp(-1.0, 0.0)
