"""Reductions over the tokens that count.

Masked positions are excluded with `torch.where`, never by multiplying: padding may hold anything, and 0 * nan is nan.
A nan at a position that counts is not hidden: it comes out of every reduction here.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.numbers import Number, as_float

WHITEN_EPS = 1e-8
"""Added to the standard deviation. Bounds the growth of nearly equal values; equal ones are 0 without it."""


def zero_masked(x: Number[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x` where `mask` holds and 0 elsewhere; the gradient at masked positions is exactly 0."""
    x = as_float(x)
    return torch.where(mask, x, torch.zeros_like(x))


def masked_sum(x: Number[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Sum of `x` over the positions of `mask`, of all dimensions or of `dim`; 0 where nothing counts."""
    return zero_masked(x, mask).sum(dim)


def masked_mean(x: Number[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Mean of `x` over the positions of `mask`; 0 (with gradient 0) where nothing counts, never 0/0."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def whiten(
    x: Number[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, eps: float = WHITEN_EPS
) -> Float[Tensor, "*shape"]:
    """Shift and scale to mean 0 and variance 1 over the positions of `mask`.

        y = (x - mean(x)) / (std(x) + eps),   std with Bessel's factor n / (n - 1)

    Degenerate samples have an answer: one value, or values that are all equal, give exactly 0; nothing valid gives
    zeros. Masked positions are 0. Computed in float64, so that the order of the rows does not show.
    """
    x = as_float(x)
    wide = zero_masked(x, mask).double()
    if not mask.any():
        return torch.zeros_like(x)
    shifted = wide - wide[mask].min()  # equal values become exact zeros, which rounding in a mean would not give
    centred = shifted - masked_mean(shifted, mask)
    variance = masked_sum(centred**2, mask) / (mask.sum() - 1).clamp(min=1)
    return zero_masked(centred / (variance.sqrt() + eps), mask).to(x.dtype)
