"""Correction for the gap between the policy that sampled (the engine) and the one that trains.

The engine computes the same weights with other kernels and precision, and may be some versions behind. With
d = old_log_probs - rollout_log_probs both are known before the update, so weights and rejections are columns made once:
rejected tokens leave the trained mask, and with it every normaliser.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.diagnostics import Metrics, mean_metric
from tasks.algorithms.kl import clamp_log_ratio, kl_per_token
from tasks.algorithms.masking import masked_mean, masked_sum, zero_masked
from tasks.algorithms.numbers import Number, as_float

CORRECTIONS = (
    "off",
    "token-truncate",
    "sequence-truncate",
    "geometric-truncate",
    "icepop",
    "reject-k1",
    "reject-k2",
    "reject-k3",
)


def rollout_correction(
    old_log_probs: Number[Tensor, "B T"],
    rollout_log_probs: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    mode: str,
    lower: float,
    upper: float,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"], Metrics]:
    """Weights for the policy loss of tokens, the tokens that stay trained, and metrics.

        off                 w = 1
        token-truncate      w = clip(exp(d), lower, upper)            Yao et al., truncated importance sampling (2025)
        sequence-truncate   w = clip(exp(sum_t d), lower, upper)      unbiased, and collapses with length
        geometric-truncate  w = clip(exp(mean_t d), lower, upper)     free of the length
        icepop              w = exp(d), tokens with w outside [lower, upper] rejected     Ring-1T, arXiv 2510.18855
        reject-k1           w = 1, rows with exp(mean_t d) outside [lower, upper] rejected
        reject-k2, -k3      w = 1, rows whose mean KL estimate is above `upper` rejected

    The KL of the rejections is KL(rollout || old), the direction of the samples. `lower` is 0 for a one-sided bound.
    Masked and rejected positions have weight 0. A nan at a token that counts is not rejected: its weight is nan.

    Metrics: `rollout/log_prob_gap` (mean |d|), `rollout/correction_weight` before and `..._clamped` after the bounds,
    `rollout/rejected_fraction` of tokens.

    Raises:
        ValueError: an unknown mode, or bounds that are not 0 <= lower <= upper.
    """
    if mode not in CORRECTIONS:
        raise ValueError(f"correction mode is {mode!r}; known are {CORRECTIONS}")
    if not 0 <= lower <= upper:
        raise ValueError(f"correction bounds are [{lower}, {upper}]; they must satisfy 0 <= lower <= upper")
    log_ratio = zero_masked(as_float(old_log_probs) - as_float(rollout_log_probs), mask)
    raw = clamp_log_ratio(_pooled(log_ratio, mask, mode)).exp()
    keep = mask
    if mode == "icepop" or mode == "reject-k1":
        keep = mask & ~((raw < lower) | (raw > upper))
    elif mode in ("reject-k2", "reject-k3"):
        kl = kl_per_token(rollout_log_probs, old_log_probs, mask, estimator=mode.removeprefix("reject-"))
        keep = mask & ~(masked_mean(kl, mask, dim=1) > upper)[:, None]
    weights = raw.clamp(lower, upper) if mode.endswith("truncate") else raw
    if mode == "off" or mode.startswith("reject"):
        weights = torch.where(log_ratio.isnan(), log_ratio, torch.ones_like(log_ratio))
    metrics = {
        **mean_metric("rollout/log_prob_gap", log_ratio.abs(), mask),
        **mean_metric("rollout/correction_weight", raw, mask),
        **mean_metric("rollout/correction_weight_clamped", weights, keep),
        **mean_metric("rollout/rejected_fraction", (mask & ~keep).float(), mask),
    }
    return zero_masked(weights, keep), keep, metrics


def _pooled(log_ratio: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The log of the weight at each position: of the token, or of its sequence."""
    if mode == "sequence-truncate":
        return masked_sum(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    if mode in ("geometric-truncate", "reject-k1"):
        return masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    return log_ratio
