"""How losses of tokens become one number, the same for every split into micro-batches; the loss of the critic.

Every normaliser is a *global* count of the mini-batch, passed in. So the loss of a mini-batch is the plain sum of the
losses of its micro-batches over all ranks, and so is its gradient.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.masking import masked_mean, masked_sum, zero_masked
from tasks.algorithms.numbers import Number

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate_loss(
    token_losses: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    aggregation: str,
    num_response_tokens: Tensor | int,
    num_sequences: Tensor | int,
    max_response_length: int | None = None,
) -> Float[Tensor, ""]:
    """Reduce the losses of tokens, l[b, t], to this micro-batch's share of the loss of the mini-batch.

        token-mean               sum_bt l / num_response_tokens                          DAPO, arXiv 2503.14476
        token-sum                sum_bt l
        seq-mean-token-sum       sum_b (sum_t l) / num_sequences
        seq-mean-token-mean      sum_b (mean_t l) / num_sequences                        GRPO, arXiv 2402.03300
        seq-mean-token-sum-norm  sum_bt l / (num_sequences * max_response_length)        Dr. GRPO, arXiv 2503.20783

    Sums run over `mask`, so padding and rows without a trained token add exactly 0, with gradient 0, and an empty
    mini-batch has loss 0. `num_response_tokens` counts the trained tokens and `num_sequences` the rows that have
    any, over the whole mini-batch and all ranks. `max_response_length` is the configured one, never a tensor's width.

    Raises:
        ValueError: an unknown aggregation, or the last one without `max_response_length`.
    """
    tokens = torch.as_tensor(num_response_tokens, device=token_losses.device).clamp(min=1)
    sequences = torch.as_tensor(num_sequences, device=token_losses.device).clamp(min=1)
    if aggregation == "token-mean":
        return masked_sum(token_losses, mask) / tokens
    if aggregation == "token-sum":
        return masked_sum(token_losses, mask)
    if aggregation == "seq-mean-token-sum":
        return masked_sum(token_losses, mask) / sequences
    if aggregation == "seq-mean-token-mean":
        return masked_mean(token_losses, mask, dim=1).sum() / sequences
    if aggregation == "seq-mean-token-sum-norm":
        if max_response_length is None:
            raise ValueError("aggregation 'seq-mean-token-sum-norm' needs max_response_length, the configured maximum")
        return masked_sum(token_losses, mask) / (sequences * max_response_length)
    raise ValueError(f"aggregation is {aggregation!r}; known are {AGGREGATIONS}")


def value_losses(
    values: Number[Tensor, "B T"],
    old_values: Number[Tensor, "B T"],
    returns: Number[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    value_clip: float | None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Squared error of the critic, pessimistic about moves larger than `value_clip`.

        l = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2

    Schulman et al., PPO, arXiv 1707.06347, in the form of its reference implementation; None turns the clip off.

    Returns:
        the losses of tokens, and where the critic moved by more than `value_clip` (measured before the clip).
    """
    values, old_values, returns = (zero_masked(x, mask) for x in (values, old_values, returns))
    plain = (values - returns) ** 2
    if value_clip is None:
        return 0.5 * plain, torch.zeros_like(mask)
    moved = (values - old_values).detach()
    clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    return 0.5 * torch.maximum(plain, (clipped - returns) ** 2), mask & (moved.abs() > value_clip)
