"""Policy losses of tokens, before aggregation: PPO's clip and its relatives.

Each takes `log_probs` (with gradient), `old_log_probs`, `advantages` [B, T] and the mask of trained tokens, and returns
the losses of tokens [B, T] and metrics. With d = log_probs - old_log_probs and rho = exp(d): d is 0 at masked positions
before anything is done with it, and clamped before `exp`, so that neither padding nor overflow reaches a gradient.
A nan at a trained position comes out as a nan loss.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.diagnostics import Metrics, mean_metric
from tasks.algorithms.kl import clamp_log_ratio
from tasks.algorithms.masking import masked_mean, zero_masked
from tasks.algorithms.numbers import Number, as_float

TokenLosses = tuple[Float[Tensor, "B T"], Metrics]


def masked_log_ratio(
    log_probs: Number[Tensor, "B T"], old_log_probs: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log_probs - old_log_probs at trained tokens, clamped to +-MAX_LOG_RATIO; 0 elsewhere."""
    return clamp_log_ratio(zero_masked(as_float(log_probs) - as_float(old_log_probs), mask))


def _clip_metric(is_clipped: Tensor, mask: Tensor) -> Metrics:
    return mean_metric("actor/clip_fraction", is_clipped.float(), mask)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-rho A, -clip(rho, 1 - low, 1 + high) A), and where the clip decided."""
    plain, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(plain, bounded), bounded.detach() > plain.detach()


def ppo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None = None,
) -> TokenLosses:
    """PPO's pessimistic clip with separate bounds, and dual clip for negative advantages.

        l = max(-rho A, -clip(rho, 1 - low, 1 + high) A);   where A < 0 further  l = min(l, -dual A)

    Schulman et al., arXiv 1707.06347; separate bounds: DAPO, arXiv 2503.14476; dual clip: Ye et al., arXiv 1912.09729.
    """
    advantages = zero_masked(advantages, mask)
    ratio = masked_log_ratio(log_probs, old_log_probs, mask).exp()
    losses, is_clipped = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    metrics = _clip_metric(is_clipped, mask)
    if clip_ratio_dual is not None:
        ceiling = -clip_ratio_dual * advantages
        is_capped = (advantages < 0) & (losses.detach() > ceiling)
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
        metrics |= mean_metric("actor/dual_clip_fraction", is_capped.float(), mask)
    return losses, metrics


def decoupled_ppo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    rollout_log_probs: Number[Tensor, "B T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None = None,
    behaviour_cap: float = 5.0,
) -> TokenLosses:
    """PPO clipped around the proximal policy, weighted back to the policy that sampled.

        l = min(exp(old_log_probs - rollout_log_probs), behaviour_cap) * l_ppo

    Hilton et al., arXiv 2110.00641; for language models Fu et al., AReaL, arXiv 2505.24298. The proximal policy is
    the one that recomputed `old_log_probs`; the behaviour policy the one that sampled. The weight has no gradient.
    """
    losses, metrics = ppo_loss(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_dual=clip_ratio_dual,
    )
    weights = masked_log_ratio(old_log_probs, rollout_log_probs, mask).exp().detach()
    metrics |= mean_metric("actor/behaviour_weight", weights, mask)
    return losses * weights.clamp(max=behaviour_cap), metrics


def gspo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLosses:
    """The clip on the length-normalised ratio of the whole sequence.

        s_i = exp(mean_t d),   l = max(-s A, -clip(s, 1 - low, 1 + high) A) on each token

    Zheng et al., GSPO, arXiv 2507.18071. The value at every token is that of the sequence; the gradient is spread over
    its tokens, each carrying s_i * grad d / its own length once aggregated by `seq-mean-token-mean`, as in the paper
    (the GSPO-token form, which is equal where the advantage is one number per sequence).
    """
    advantages = zero_masked(advantages, mask)
    log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
    sequence = masked_mean(log_ratio, mask, dim=1)[:, None].detach()
    ratio = (log_ratio - log_ratio.detach() + sequence).exp()
    losses, is_clipped = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return losses, _clip_metric(is_clipped, mask)


def gmpo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLosses:
    """Geometric mean of the tokens' ratios, each clipped in log space on its pessimistic side.

        s = sign(A);  c_t = s * min(s d, s clip(d, -low, high));   l = -exp(mean_t c_t) A on each token

    Zhao et al., GMPO, arXiv 2507.20673. The bounds are on d, not on rho (the paper's 0.4 is e^-0.4 .. e^0.4).
    Aggregate by `seq-mean-token-mean`.
    """
    advantages = zero_masked(advantages, mask)
    log_ratio, sign = masked_log_ratio(log_probs, old_log_probs, mask), advantages.sign()
    plain, bounded = sign * log_ratio, sign * log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    geometric = masked_mean(sign * torch.minimum(plain, bounded), mask, dim=1)[:, None].exp()
    return -geometric * advantages, _clip_metric(bounded.detach() < plain.detach(), mask)


def cispo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLosses:
    """REINFORCE with a clipped, detached importance weight: no token ever loses its gradient.

        l = -stop_gradient(clip(rho, 1 - low, 1 + high)) A log_probs

    MiniMax-M1, arXiv 2506.13585. `clip_ratio_low` of 1 or more means no lower bound, as in the paper.
    """
    advantages = zero_masked(advantages, mask)
    ratio = masked_log_ratio(log_probs, old_log_probs, mask).exp().detach()
    weight = ratio.clamp(max(1 - clip_ratio_low, 0.0), 1 + clip_ratio_high)
    return -weight * advantages * zero_masked(log_probs, mask), _clip_metric(weight != ratio, mask)


def sapo_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLosses:
    """A sigmoid gate in place of the clip; sharper for negative advantages.

        l = -(4 / tau) * sigmoid(tau * (rho - 1)) * A,   tau = temperature_positive where A > 0, else _negative

    Gao et al., SAPO, arXiv 2511.20347. At rho = 1 the gradient is that of plain policy gradient.
    """
    advantages = zero_masked(advantages, mask)
    ratio = masked_log_ratio(log_probs, old_log_probs, mask).exp()
    tau = torch.where(advantages > 0, temperature_positive, temperature_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, {}


def gpg_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> TokenLosses:
    """Plain policy gradient: l = -A log_probs, without ratio or clip. Chu et al., GPG, arXiv 2504.02546."""
    del old_log_probs  # every policy loss has the same arguments
    return -zero_masked(advantages, mask) * zero_masked(log_probs, mask), {}


def clip_cov_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    selected_mask: Bool[Tensor, "B T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLosses:
    """PPO's clip; the tokens of `selected_mask` (see `select_clip_cov`) have no loss and no gradient.

    Cui et al., "The Entropy Mechanism of RL", arXiv 2505.22617, Clip-Cov. They still count in the normaliser.
    """
    losses, metrics = ppo_loss(
        log_probs, old_log_probs, advantages, mask, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    return zero_masked(losses, ~selected_mask), metrics | mean_metric("actor/selected", selected_mask.float(), mask)


def kl_cov_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    selected_mask: Bool[Tensor, "B T"],
    covariance_kl_coef: float,
) -> TokenLosses:
    """Unclipped policy gradient; the tokens of `selected_mask` (see `select_kl_cov`) are held back to the old policy.

        l = -rho A + [selected] covariance_kl_coef * |d|

    Cui et al., "The Entropy Mechanism of RL", arXiv 2505.22617, KL-Cov.
    """
    advantages = zero_masked(advantages, mask)
    log_ratio = masked_log_ratio(log_probs, old_log_probs, mask)
    penalty = zero_masked(covariance_kl_coef * log_ratio.abs(), selected_mask)
    return penalty - log_ratio.exp() * advantages, mean_metric("actor/selected", selected_mask.float(), mask)


def importance_weighted_loss(
    log_probs: Number[Tensor, "B T"],
    old_log_probs: Number[Tensor, "B T"],
    advantages: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> TokenLosses:
    """l = -rho A, without a clip: what on-policy distillation trains its teacher advantages with."""
    ratio = masked_log_ratio(log_probs, old_log_probs, mask).exp()
    return -ratio * zero_masked(advantages, mask), {}


POLICY_LOSSES: dict[str, Callable[..., TokenLosses]] = {
    "ppo": ppo_loss,
    "grpo": ppo_loss,
    "dr_grpo": ppo_loss,
    "rloo": ppo_loss,
    "reinforce_plus_plus": ppo_loss,
    "reinforce_plus_plus_baseline": ppo_loss,
    "remax": ppo_loss,
    "dapo": ppo_loss,
    "opo": ppo_loss,
    "pass_at_k": ppo_loss,
    "decoupled_ppo": decoupled_ppo_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gpg": gpg_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "distillation": importance_weighted_loss,
}
"""Name of the algorithm -> its policy loss."""

LOSS_COLUMNS: dict[str, tuple[str, ...]] = {
    "decoupled_ppo": ("rollout_log_probs",),
    "clip_cov": ("selected_mask",),
    "kl_cov": ("selected_mask",),
}
"""Columns that a policy loss reads beyond the four that all read."""
