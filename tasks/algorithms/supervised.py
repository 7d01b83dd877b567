"""Supervised objectives on the same workers: next-token cross-entropy, and preference pairs for a reward model."""

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tasks.algorithms.diagnostics import COUNT, Metrics, mean_metric
from tasks.algorithms.masking import masked_sum
from tasks.algorithms.numbers import Number, as_float


def supervised_objective(
    log_probs: Number[Tensor, "B T"], entropy: Number[Tensor, "B T"] | None, td: Mapping[str, Tensor]
) -> tuple[Float[Tensor, ""], Metrics]:
    """Mean negative log-likelihood of the demonstrated tokens, this micro-batch's share of it.

        L = -sum_{b,t in train_mask} log_probs[b,t] / num_response_tokens

    `num_response_tokens` is the global count of the mini-batch, so that micro-batches and ranks add up.
    """
    mask = td["train_mask"] if "train_mask" in td else td["response_mask"]
    loss = -masked_sum(log_probs, mask) / td["num_response_tokens"].clamp(min=1)
    return loss, mean_metric("sft/loss", -as_float(log_probs), mask)


def preference_objective(
    chosen: Number[Tensor, " P"], rejected: Number[Tensor, " P"], td: Mapping[str, Tensor]
) -> tuple[Float[Tensor, ""], Metrics]:
    """`preference_loss` as a worker calls it: `num_sequences` of the mini-batch counts its pairs."""
    return preference_loss(chosen, rejected, td["num_sequences"])


def preference_loss(
    chosen: Number[Tensor, " P"], rejected: Number[Tensor, " P"], num_pairs: Number[Tensor, ""]
) -> tuple[Float[Tensor, ""], Metrics]:
    """Bradley-Terry loss of a reward model on pairs (Ouyang et al. 2022, arXiv:2203.02155, equation 1).

        L = -sum log sigmoid(chosen - rejected) / num_pairs

    `num_pairs` is the global count of the mini-batch.
    """
    chosen, rejected, num_pairs = as_float(chosen), as_float(rejected), as_float(num_pairs)
    loss = -F.logsigmoid(chosen - rejected).sum() / num_pairs.clamp(min=1)
    margin = (chosen - rejected).detach()
    correct = (margin > 0).to(margin.dtype)
    count = num_pairs.new_tensor(float(margin.numel()))
    return loss, {
        "reward_model/accuracy": correct.sum(), "reward_model/accuracy" + COUNT: count,
        "reward_model/margin": margin.sum(), "reward_model/margin" + COUNT: count,
    }  # fmt: skip
