"""Advantages of a response relative to its siblings: the responses that share its `group_ids`.

Three rules hold for every function here. Groups come from ids, never from the position or the number of rows, so they
may be ragged and lie in any order. A nan score (unscorable) is no vote in any statistic and has advantage 0. A group
with fewer than two votes, or with equal scores, has advantage exactly 0: there is nothing to compare.

`rollout_ids` [B] says which rows are segments of one rollout (an agent's context that was cut into several rows, each
with the rollout's score); a rollout has one vote however many rows it fills. None: every row is a rollout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.algorithms.masking import zero_masked
from tasks.algorithms.numbers import Number

GRPO_EPS = 1e-6
"""Added to a group's standard deviation; bounds the advantage where scores are nearly equal."""


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """What a row needs of its group, repeated for each row, in float64; all [B].

    `scores` are shifted by the group's lowest, which changes no advantage and makes equal scores exact zeros.
    """

    scores: Tensor
    votes: Tensor
    num_votes: Tensor
    mean: Tensor
    index: Tensor
    num_groups: int

    def total(self, x: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Sum over the rows of each group, given back to each row."""
        return _group_sum(x, self.index, self.num_groups)[self.index]

    def std(self) -> Float[Tensor, " B"]:
        """Standard deviation with Bessel's factor; 0 below two votes."""
        squares = self.total(self.votes * (self.scores - self.mean) ** 2)
        return (squares / (self.num_votes - 1).clamp(min=1)).sqrt()


def _number(ids: Tensor) -> tuple[Tensor, int]:
    """Number the distinct ids 0, 1, ...: the number of each row, and how many there are."""
    unique = cast("Callable[..., tuple[Tensor, Tensor]]", torch.unique)  # pyright: ignore[reportUnknownMemberType] torch leaves it unannotated
    distinct, index = unique(ids, return_inverse=True)
    return index, len(distinct)


def _group_sum(x: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=x.dtype, device=x.device).index_add(0, index, x)


def rollout_votes(scorable: Bool[Tensor, " B"], rollout_ids: Int[Tensor, " B"] | None = None) -> Float[Tensor, " B"]:
    """Weight of a row: 1 / (scorable rows of its rollout), 0 when it is not scorable."""
    if rollout_ids is None:
        return scorable.double()
    index, num_rollouts = _number(rollout_ids)
    return scorable / _group_sum(scorable.double(), index, num_rollouts)[index].clamp(min=1)


def group_statistics(
    scores: Number[Tensor, " B"], group_ids: Int[Tensor, " B"], rollout_ids: Int[Tensor, " B"] | None = None
) -> GroupStatistics:
    """Votes and mean of each row's group."""
    scorable = ~scores.isnan()
    index, num_groups = _number(group_ids)
    known = zero_masked(scores, scorable).double()
    bottom = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=scores.device)
    bottom = bottom.scatter_reduce(0, index, known.masked_fill(~scorable, torch.inf), "amin")
    shifted = zero_masked(known - bottom[index], scorable)
    votes = rollout_votes(scorable, rollout_ids)
    num_votes = _group_sum(votes, index, num_groups)[index]
    mean = _group_sum(votes * shifted, index, num_groups)[index] / num_votes.clamp(min=1)
    return GroupStatistics(
        scores=shifted, votes=votes, num_votes=num_votes, mean=mean, index=index, num_groups=num_groups
    )


def _finish(advantages: Tensor, group: GroupStatistics, like: Tensor) -> Tensor:
    """0 for rows without a vote and for groups with fewer than two (a sum of thirds may miss 2 by rounding)."""
    has_siblings = (group.votes > 0) & (group.num_votes > 1.5)
    return _in_type_of(like, zero_masked(advantages, has_siblings))


def _in_type_of(scores: Tensor, advantages: Tensor) -> Tensor:
    """The type of the scores; whole numbers have advantages that are fractions."""
    return advantages.to(scores.dtype if scores.is_floating_point() else torch.float32)


def group_relative(
    scores: Number[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    scale_by_std: bool,
    rollout_ids: Int[Tensor, " B"] | None = None,
    eps: float = GRPO_EPS,
) -> Float[Tensor, " B"]:
    """Score minus the mean of the group, divided by its standard deviation or not.

    GRPO:    A_i = (r_i - mean(r)) / (std(r) + eps)     Shao et al., arXiv 2402.03300; std with Bessel's factor
    Dr.GRPO: A_i =  r_i - mean(r)                       Liu et al., arXiv 2503.20783
    """
    group = group_statistics(scores, group_ids, rollout_ids)
    centred = group.scores - group.mean
    return _finish(centred / (group.std() + eps) if scale_by_std else centred, group, scores)


def leave_one_out(
    scores: Number[Tensor, " B"], group_ids: Int[Tensor, " B"], *, rollout_ids: Int[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Score minus the mean of the *other* rollouts of the group.

        A_i = r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean(r)) * n / (n - 1)

    Ahmadian et al., RLOO, arXiv 2402.14740.
    """
    group = group_statistics(scores, group_ids, rollout_ids)
    bessel = group.num_votes / (group.num_votes - 1).clamp(min=1)
    return _finish((group.scores - group.mean) * bessel, group, scores)


def optimal_baseline(
    scores: Number[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    response_lengths: Int[Tensor, " B"],
    *,
    rollout_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Score minus the length-weighted mean of the group, the baseline of least gradient variance.

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    Hao et al., OPO, arXiv 2505.23585. `response_lengths` counts the sampled tokens of a row. Meant for exactly
    on-policy updates (one optimizer step per rollout batch).
    """
    group = group_statistics(scores, group_ids, rollout_ids)
    weights = zero_masked(response_lengths.double(), group.votes > 0)
    baseline = group.total(weights * group.scores) / group.total(weights).clamp(min=1)
    return _finish(group.scores - baseline, group, scores)


def group_policy_gradient(
    scores: Number[Tensor, " B"], group_ids: Int[Tensor, " B"], *, rollout_ids: Int[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Centred scores, scaled up for the groups that give no gradient.

        A_i = alpha * (r_i - mean(r)),   alpha = B / (B - M)

    Chu et al., GPG, arXiv 2504.02546 (normaliser F = 1). B counts the scorable rollouts and M those of them in groups
    whose scores are all equal. alpha is 1 when no group has signal.
    """
    group = group_statistics(scores, group_ids, rollout_ids)
    with_signal = zero_masked(group.votes, rows_with_signal(scores, group_ids)).sum()
    alpha = group.votes.sum() / with_signal if with_signal > 0 else torch.ones(())
    return _finish(alpha * (group.scores - group.mean), group, scores)


def pass_at_k_advantages(
    scores: Number[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    k: int,
    correct_above: float = 0.5,
    rollout_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Advantage of a response under the pass@k objective, in closed form over all k-subsets of its group.

        R    = 1 - C(n_wrong, k) / C(n, k)                                        pass@k of the group
        A_ok = (1 - R) / sqrt(R (1 - R))
        A_no = (1 - R - C(n_wrong - 1, k - 1) / C(n - 1, k - 1)) / sqrt(R (1 - R))

    Chen et al., "Pass@k Training", arXiv 2508.10751. A score above `correct_above` is correct. A
    group with R of 0 or 1, or with fewer than k scorable responses, has no signal. k = 1 is GRPO with the population's
    standard deviation.

    Raises:
        ValueError: k below 1.
    """
    if k < 1:
        raise ValueError(f"pass_k is {k}; it must be at least 1")
    is_scorable = ~scores.isnan()
    index, num_groups = _number(group_ids)
    is_wrong = is_scorable & (scores <= correct_above)
    votes = rollout_votes(is_scorable, rollout_ids)
    n = _group_sum(votes, index, num_groups).round()[index]
    n_wrong = _group_sum(zero_masked(votes, is_wrong), index, num_groups).round()[index]
    all_wrong = _choose_ratio(n_wrong, n, k)  # 1 - R
    spread = (all_wrong * (1 - all_wrong)).sqrt()
    has_signal = is_scorable & (n >= k) & (spread > 0)
    siblings_wrong = _choose_ratio(n_wrong - 1, n - 1, k - 1)
    advantages = (all_wrong - zero_masked(siblings_wrong, is_wrong)) / torch.where(has_signal, spread, 1.0)
    return _in_type_of(scores, zero_masked(advantages, has_signal))


def _choose_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k) as a product of k factors, exact where binomials would overflow; 0 when part < k."""
    ratio = torch.ones_like(whole)
    for j in range(k):
        ratio = ratio * (part - j).clamp(min=0) / (whole - j).clamp(min=1)
    return ratio


def groups_with_signal(scores: Number[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Bool[Tensor, " P"]:
    """Whether each group, in the order of its id, has scorable scores that differ: no estimator learns from others."""
    group = group_statistics(scores, group_ids)
    return _group_sum((group.scores > 0).double(), group.index, group.num_groups) > 0


def rows_with_signal(scores: Number[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Rows of the groups with signal: what dynamic sampling keeps. Yu et al., DAPO, arXiv 2503.14476."""
    return groups_with_signal(scores, group_ids)[_number(group_ids)[0]]
