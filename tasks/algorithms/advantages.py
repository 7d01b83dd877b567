"""Advantages from the rewards of a response's own tokens: GAE, discounted returns, the greedy baseline.

All recursions run over the tokens that the policy sampled. Tool output inside a response and padding after it are
stepped over: no discount, no value and no reward is taken from them.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.algorithms.masking import zero_masked
from tasks.algorithms.numbers import Number, as_float


def gae(
    token_rewards: Number[Tensor, "B T"],
    values: Number[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Number[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation on the subsequence of sampled tokens.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lambda * A_next          next = the next sampled token of the same row
        R_t     = A_t + V_t

    Schulman et al., arXiv 1506.02438. `values[b, t]` is the value of the prefix before token t. After the last token
    V_next is 0 (terminal) or `bootstrap_values[b]`, the value of the cut response's own last state, where a
    response ended at the length limit. Masked positions of both results are 0, and whatever stands in `values` or
    `token_rewards` there (nan included) is not read.

    Returns:
        advantages and returns, not whitened.
    """
    token_rewards, known = zero_masked(token_rewards, response_mask), zero_masked(values, response_mask)
    next_value = known.new_zeros(known.shape[0]) if bootstrap_values is None else as_float(bootstrap_values)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(known)
    for t in reversed(range(known.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - known[:, t]
        sampled = response_mask[:, t]
        next_advantage = torch.where(sampled, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(sampled, known[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = zero_masked(advantages, response_mask)
    return advantages, zero_masked(advantages + known, response_mask)


def discounted_returns(
    token_rewards: Number[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, gamma: float
) -> Float[Tensor, "B T"]:
    """Reward to go, one discount for each sampled token: R_t = r_t + gamma * R_next.

    Hu et al., REINFORCE++, arXiv 2501.03262. A token before a tool call still sees the reward after it.
    Masked positions are 0.
    """
    rewards = zero_masked(token_rewards, response_mask)
    returns, following = torch.zeros_like(rewards), rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(response_mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return zero_masked(returns, response_mask)


def remax_advantages(
    token_rewards: Number[Tensor, "B T"],
    baseline_scores: Number[Tensor, " B"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Undiscounted reward to go minus the score of the greedy response to the same prompt.

        A_t = sum_{s >= t} r_s - b

    Li et al., ReMax, arXiv 2310.10505. `baseline_scores` [B] holds b, a number for each prompt, repeated for its
    responses. Masked positions are 0.
    """
    to_go = discounted_returns(token_rewards, response_mask, gamma=1.0)
    return zero_masked(to_go - as_float(baseline_scores)[:, None], response_mask)


def broadcast_to_tokens(
    sequence_advantages: Number[Tensor, " B"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """One number per response, on each of its sampled tokens; 0 elsewhere."""
    return zero_masked(sequence_advantages[:, None].expand(response_mask.shape), response_mask)
