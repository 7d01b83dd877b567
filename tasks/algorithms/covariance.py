"""Which tokens drive the collapse of entropy: those whose log-prob and advantage vary together the most.

    cov_t = (log_probs_t - mean(log_probs)) * (advantages_t - mean(advantages))

Cui et al., "The Entropy Mechanism of RL", arXiv 2505.22617. The means and the selection are taken over the
whole rollout batch with the log-probs from before the update, once. The authors' code takes them over each
micro-batch, with which the result depends on the micro-batch size.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.algorithms.masking import masked_mean, zero_masked
from tasks.algorithms.numbers import Number, as_float


def token_covariance(
    old_log_probs: Number[Tensor, "B T"], advantages: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The product of deviations at each trained token; 0 elsewhere."""
    log_probs, advantages = zero_masked(old_log_probs, mask), zero_masked(advantages, mask)
    product = (log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask))
    return zero_masked(product, mask)


def select_kl_cov(
    covariance: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, fraction: float
) -> Bool[Tensor, "B T"]:
    """KL-Cov: the `fraction` of trained tokens with the largest covariance, at least one when any is trained."""
    return _take(as_float(covariance).masked_fill(~mask, -torch.inf), mask, _share(mask, fraction))


def select_clip_cov(
    covariance: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    row_ids: Int[Tensor, " B"],
    *,
    fraction: float,
    lower: float,
    upper: float,
    seed: int,
) -> Bool[Tensor, "B T"]:
    """Clip-Cov: a random `fraction` of the trained tokens, drawn among those with lower < covariance < upper.

    The draw is a function of `seed` and the row ids, not of the order of the rows.
    """
    candidates = mask & (covariance > lower) & (covariance < upper)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.empty(mask.shape)
    keys[row_ids.argsort().cpu()] = torch.rand(mask.shape, generator=generator)
    return _take(keys.to(mask.device).masked_fill(~candidates, -torch.inf), candidates, _share(mask, fraction))


def _share(mask: Tensor, fraction: float) -> int:
    return max(1, int(fraction * int(mask.sum())))


def _take(keys: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates with the largest keys (fewer if there are not so many)."""
    top = keys.flatten().topk(min(count, int(candidates.sum()))).indices
    return torch.zeros_like(candidates).flatten().index_fill(0, top, True).view_as(candidates)
