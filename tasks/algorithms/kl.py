"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, and the controller of its coefficient."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.masking import zero_masked
from tasks.algorithms.numbers import Number, as_float

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is 5e8, far beyond any trained policy."""
MAX_K3 = 10.0
"""k3 is capped here; at the cap its gradient is 0, so that one freak token cannot set the step."""
MAX_KL_ERROR = 0.2
"""The paper's bound on the controller's relative error: one freak batch moves the coefficient no faster than this."""


def clamp_log_ratio(log_ratio: Number[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Clamp to +-MAX_LOG_RATIO. Infinities become finite; nan stays nan."""
    return as_float(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Tensor) -> Tensor:
    return (torch.expm1(-log_ratio) + log_ratio).clamp(max=MAX_K3)


def _straight_through(value: Tensor, log_ratio: Tensor) -> Tensor:
    surrogate = _k2(log_ratio)
    return value.detach() + surrogate - surrogate.detach()


def _k1_straight_through(log_ratio: Tensor) -> Tensor:
    return _straight_through(_k1(log_ratio), log_ratio)


def _k3_straight_through(log_ratio: Tensor) -> Tensor:
    return _straight_through(_k3(log_ratio), log_ratio)


_ESTIMATORS = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "k1-straight-through": _k1_straight_through,
    "k3-straight-through": _k3_straight_through,
}


def kl_per_token(
    log_probs: Number[Tensor, "B T"],
    ref_log_probs: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    estimator: str,
) -> Float[Tensor, "B T"]:
    """Estimate KL(policy || reference) at every token that was sampled from the policy.

        d = log_probs - ref_log_probs,  clamped to +-MAX_LOG_RATIO
        k1 = d              unbiased, signed; as a *loss* its gradient is 0 on average, so use it in the reward
        k2 = d^2 / 2        biased; as a loss its gradient is the true gradient of the KL
        k3 = e^-d - 1 + d   unbiased, never negative, capped at MAX_K3

    `k1-straight-through` and `k3-straight-through` have the value of k1 or k3 and the gradient of k2.
    Schulman, "Approximating KL divergence" (2020); the gradients: Tang and Munos, arXiv 2506.09477.
    Masked positions are 0 and have gradient 0.
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"KL estimator is {estimator!r}; known are {sorted(_ESTIMATORS)}")
    log_ratio = clamp_log_ratio(zero_masked(as_float(log_probs) - as_float(ref_log_probs), mask))
    return zero_masked(_ESTIMATORS[estimator](log_ratio), mask)


def update_kl_coef(kl_coef: float, measured_kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """One step of the proportional controller that steers the measured KL to `target`.

        kl_coef' = kl_coef * (1 + clip(measured_kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593. `target` is in
    nats per sequence and `horizon` in sequences.

    Raises:
        ValueError: a target or horizon that is not positive, a horizon so short that the coefficient would turn
            negative, or a measured KL that is not finite.
    """
    if not (target > 0 and horizon > 0):  # nan is neither
        raise ValueError(f"adaptive KL has target {target} and horizon {horizon}; both must be positive")
    if not math.isfinite(measured_kl):
        raise ValueError(f"the measured KL is {measured_kl}; it cannot drive the coefficient, look at the log-probs")
    error = min(max(measured_kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    factor = 1.0 + error * num_sequences / horizon
    if factor <= 0:
        raise ValueError(
            f"adaptive KL has horizon {horizon} and {num_sequences} sequences a step; the coefficient would turn "
            f"negative, so horizon must be above {MAX_KL_ERROR} x {num_sequences}"
        )
    return kl_coef * factor
