"""Measures of a step, as sums and counts that add up over micro-batches, ranks and steps.

A mean is kept under two keys, `x` (a sum) and `x/count`; a key that ends in `/max` is a maximum; any other is a sum.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.kl import clamp_log_ratio
from tasks.algorithms.masking import masked_sum, zero_masked
from tasks.algorithms.numbers import Number, as_float

Metrics = dict[str, Tensor]

COUNT = "/count"
MAX = "/max"

TRUNCATED = 1
"""The finish reason of a response cut at the length limit."""


def mean_metric(name: str, x: Number[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Metrics:
    """Sum and count of `x` over `mask`, detached: one mean, whichever way the positions were split.

    In float32 at least: bfloat16 cannot count beyond 256.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return {name: masked_sum(wide, mask), name + COUNT: mask.sum().to(wide.dtype)}


def finite_mean_metric(name: str, x: Number[Tensor, "*shape"]) -> Metrics:
    """`mean_metric` over the entries that are not nan: for scores, where nan says 'not scorable'."""
    return mean_metric(name, x, ~x.isnan())


def finish_metrics(total: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Turn merged sums and counts into numbers to log; a mean over nothing is absent, not 0.

    >>> finish_metrics({"actor/entropy": 34.0, "actor/entropy/count": 26.0, "x": 0.0, "x/count": 0.0, "y": 2.0})
    {'actor/entropy': 1.3076923076923077, 'y': 2.0}
    """
    finished: dict[str, float] = {}
    for name, value in total.items():
        count = float(total[name + COUNT]) if name + COUNT in total else None
        if name.endswith(COUNT) or count == 0:
            continue
        finished[name] = float(value) if count is None else float(value) / count
    return finished


def policy_movement(log_ratio: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Metrics:
    """How far the policy is from the one before the update, over the trained tokens.

        actor/approx_kl = mean(exp(d) - 1 - d),  d = log_probs - old_log_probs      (Schulman's k3 of old to new)

    Further `actor/ratio` (mean) and `actor/log_ratio/max` (largest |d|, 0 on the first optimizer step).
    """
    log_ratio = zero_masked(log_ratio.detach(), mask)
    bounded = clamp_log_ratio(log_ratio)
    return {
        **mean_metric("actor/approx_kl", torch.expm1(bounded) - bounded, mask),
        **mean_metric("actor/ratio", bounded.exp(), mask),
        "actor/log_ratio/max": log_ratio.abs().amax() if log_ratio.numel() else log_ratio.sum(),
    }


def sample_entropy(log_probs: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Metrics:
    """Entropy estimated from the sampled tokens, -mean(log_probs): unbiased on-policy, and free."""
    return mean_metric("actor/sample_entropy", -as_float(log_probs), mask)


def explained_variance(
    values: Number[Tensor, "B T"], returns: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows only the mean.

    nan where the returns do not vary, since then there is nothing to explain.
    """
    values, returns = as_float(values), as_float(returns)
    target, error = (torch.masked_select(x, mask).double() for x in (returns, returns - values))
    if target.numel() < 2 or bool(target.max() == target.min()):
        return torch.tensor(math.nan, dtype=returns.dtype)
    return (1 - error.var() / target.var()).to(returns.dtype)
