"""The estimators by the name of their algorithm, behind one signature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tasks.algorithms.advantages import broadcast_to_tokens, discounted_returns, gae, remax_advantages
from tasks.algorithms.diagnostics import TRUNCATED
from tasks.algorithms.distillation import teacher_advantages
from tasks.algorithms.group_advantages import (
    group_policy_gradient,
    group_relative,
    leave_one_out,
    optimal_baseline,
    pass_at_k_advantages,
)
from tasks.algorithms.masking import zero_masked

Estimate = tuple[Tensor, Tensor | None]
"""Advantages [B, T] and, with a critic, returns [B, T]."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """What an estimator works on; `sequence` [B] is nan where a row is unscorable, and `mask` [B, T] leaves it out."""

    token: Tensor
    sequence: Tensor
    mask: Tensor
    columns: Mapping[str, Tensor]

    @property
    def group_ids(self) -> Tensor:
        """Which prompt each row answers."""
        return self.columns["group_ids"]

    @property
    def rollout_ids(self) -> Tensor | None:
        """Which rollout each row is a segment of; None when every row is one."""
        return self.columns.get("rollout_ids")


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Numbers that some estimators read."""

    gamma: float
    gae_lambda: float
    scale_by_std: bool
    pass_k: int
    pass_threshold: float
    bootstrap_truncated: bool


def _gae(rewards: Rewards, knobs: Knobs) -> Estimate:
    bootstrap = None
    if knobs.bootstrap_truncated:
        is_cut = rewards.columns["finish_reasons"] == TRUNCATED
        bootstrap = zero_masked(rewards.columns["bootstrap_values"], is_cut)
    return gae(
        rewards.token,
        rewards.columns["values"],
        rewards.mask,
        gamma=knobs.gamma,
        gae_lambda=knobs.gae_lambda,
        bootstrap_values=bootstrap,
    )


def _per_sequence(advantages: Tensor, rewards: Rewards) -> Estimate:
    return broadcast_to_tokens(advantages, rewards.mask), None


def _group_relative(rewards: Rewards, knobs: Knobs) -> Estimate:
    advantages = group_relative(
        rewards.sequence, rewards.group_ids, scale_by_std=knobs.scale_by_std, rollout_ids=rewards.rollout_ids
    )
    return _per_sequence(advantages, rewards)


def _leave_one_out(rewards: Rewards, knobs: Knobs) -> Estimate:
    del knobs
    return _per_sequence(leave_one_out(rewards.sequence, rewards.group_ids, rollout_ids=rewards.rollout_ids), rewards)


def _discounted(rewards: Rewards, knobs: Knobs) -> Estimate:
    return discounted_returns(rewards.token, rewards.mask, gamma=knobs.gamma), None


def _remax(rewards: Rewards, knobs: Knobs) -> Estimate:
    del knobs
    return remax_advantages(rewards.token, rewards.columns["baseline_scores"], rewards.mask), None


def _group_policy_gradient(rewards: Rewards, knobs: Knobs) -> Estimate:
    del knobs
    advantages = group_policy_gradient(rewards.sequence, rewards.group_ids, rollout_ids=rewards.rollout_ids)
    return _per_sequence(advantages, rewards)


def _optimal_baseline(rewards: Rewards, knobs: Knobs) -> Estimate:
    del knobs
    lengths = rewards.mask.sum(dim=1)
    advantages = optimal_baseline(rewards.sequence, rewards.group_ids, lengths, rollout_ids=rewards.rollout_ids)
    return _per_sequence(advantages, rewards)


def _pass_at_k(rewards: Rewards, knobs: Knobs) -> Estimate:
    advantages = pass_at_k_advantages(
        rewards.sequence,
        rewards.group_ids,
        k=knobs.pass_k,
        correct_above=knobs.pass_threshold,
        rollout_ids=rewards.rollout_ids,
    )
    return _per_sequence(advantages, rewards)


def _teacher_alone(rewards: Rewards, knobs: Knobs) -> Estimate:
    del knobs
    student, teacher = rewards.columns["old_log_probs"], rewards.columns["teacher_log_probs"]
    return teacher_advantages(student, teacher, rewards.mask), None


ESTIMATORS: dict[str, Callable[[Rewards, Knobs], Estimate]] = {
    "ppo": _gae,
    "decoupled_ppo": _gae,
    "grpo": _group_relative,
    "dr_grpo": _group_relative,
    "dapo": _group_relative,
    "gspo": _group_relative,
    "gmpo": _group_relative,
    "cispo": _group_relative,
    "sapo": _group_relative,
    "clip_cov": _group_relative,
    "kl_cov": _group_relative,
    "rloo": _leave_one_out,
    "reinforce_plus_plus": _discounted,
    "reinforce_plus_plus_baseline": _group_relative,
    "remax": _remax,
    "gpg": _group_policy_gradient,
    "opo": _optimal_baseline,
    "pass_at_k": _pass_at_k,
    "distillation": _teacher_alone,
}
"""Name of the algorithm -> its estimator."""

ESTIMATOR_COLUMNS: dict[str, tuple[str, ...]] = {
    "ppo": ("values",),
    "decoupled_ppo": ("values",),
    "remax": ("baseline_scores",),
    "clip_cov": ("old_log_probs", "row_ids"),
    "kl_cov": ("old_log_probs",),
    "distillation": ("old_log_probs", "teacher_log_probs"),
}
"""Columns that an estimator reads beyond `response_mask`, `scores` and `group_ids`."""
