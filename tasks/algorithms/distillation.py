"""On-policy distillation: the student samples, the teacher scores the same tokens."""

from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.masking import zero_masked
from tasks.algorithms.numbers import Number

MIN_TAIL = 1e-6
"""Least probability given to the tail outside the top k, in float32 the rounding of a sum that ought to be 1."""


def teacher_advantages(
    old_log_probs: Number[Tensor, "B T"], teacher_log_probs: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Reverse KL as a reward: each sampled token is paid what the teacher finds it likelier than the student.

        A_t = teacher_log_probs_t - old_log_probs_t        (minus k1 of KL(student || teacher))

    No reward to go: a token answers for itself. Agarwal et al., GKD, arXiv 2306.13649; Lu et al., "On-Policy
    Distillation", Thinking Machines (2025). Masked positions are 0.
    """
    return -kl_per_token(old_log_probs, teacher_log_probs, mask, estimator="k1")


def reverse_kl_losses(
    log_probs: Number[Tensor, "B T"], teacher_log_probs: Number[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Reverse KL as a loss of tokens: the value of k3 and the gradient of k2, the true one on-policy."""
    return kl_per_token(log_probs, teacher_log_probs, mask, estimator="k3-straight-through")


def forward_kl_top_k(
    top_k_log_probs: Number[Tensor, "B T K"],
    teacher_top_k_log_probs: Number[Tensor, "B T K"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Forward KL(teacher || student) over the teacher's k likeliest tokens and one cell for all the others.

        l_t = sum_{v in top k} p_v (log p_v - log q_v) + p_tail (log p_tail - log q_tail)

    p is the teacher's distribution, q the student's at the same ids. With the tail as one more cell this is the KL of
    two proper distributions: never negative, 0 when the cells agree, and at most the full KL. Without it a student
    could lower the loss by taking probability from the tail. Hinton et al., arXiv 1503.02531. Masked positions are 0.
    """
    valid = mask[..., None].expand(top_k_log_probs.shape)
    log_q, log_p = zero_masked(top_k_log_probs, valid), zero_masked(teacher_top_k_log_probs, valid)
    tail_q, tail_p = (1 - x.exp().sum(-1).clamp(max=1 - MIN_TAIL) for x in (log_q, log_p))
    losses = (log_p.exp() * (log_p - log_q)).sum(-1) + tail_p * (tail_p.log() - tail_q.log())
    return zero_masked(losses, mask)
