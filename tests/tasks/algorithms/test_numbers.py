"""Whole numbers and truth values give what the same numbers give as floats: no function cuts a fraction off."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from tasks.algorithms.advantage_step import estimate_advantages
from tasks.algorithms.advantages import broadcast_to_tokens, discounted_returns, gae, remax_advantages
from tasks.algorithms.covariance import select_clip_cov, select_kl_cov, token_covariance
from tasks.algorithms.diagnostics import (
    explained_variance,
    finite_mean_metric,
    mean_metric,
    policy_movement,
    sample_entropy,
)
from tasks.algorithms.distillation import forward_kl_top_k, reverse_kl_losses, teacher_advantages
from tasks.algorithms.group_advantages import (
    group_policy_gradient,
    group_relative,
    group_statistics,
    groups_with_signal,
    leave_one_out,
    optimal_baseline,
    pass_at_k_advantages,
    rows_with_signal,
)
from tasks.algorithms.kl import clamp_log_ratio, kl_per_token
from tasks.algorithms.losses import aggregate_loss, value_losses
from tasks.algorithms.masking import masked_mean, masked_sum, whiten, zero_masked
from tasks.algorithms.numbers import as_float
from tasks.algorithms.off_policy import CORRECTIONS, rollout_correction
from tasks.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo_loss,
    clip_cov_loss,
    decoupled_ppo_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    importance_weighted_loss,
    kl_cov_loss,
    masked_log_ratio,
    ppo_loss,
    sapo_loss,
)
from tasks.algorithms.supervised import preference_loss, preference_objective, supervised_objective
from tasks.algorithms.token_rewards import spread_scores

MASK = tensor([[True, False, True, True], [True, True, False, False], [True, True, True, False]])
X = tensor([[3, -1, 2, -2], [0, 1, -2, 4], [1, 2, -3, 1]])
Y = tensor([[1, 2, 0, -1], [-1, 0, 2, 1], [0, 3, 1, 2]])
SCORES = tensor([1, 0, 3])
GROUPS, ROWS = tensor([7, 7, 7]), tensor([0, 1, 2])
COUNT = tensor(3)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
TD = {"response_mask": MASK, "num_response_tokens": tensor(8.0), "num_sequences": tensor(3.0)}

Call = Callable[[Tensor, Tensor, Tensor], Any]
CALLS: dict[Callable[..., Any], Call] = {
    as_float: lambda x, y, s: as_float(x),
    zero_masked: lambda x, y, s: zero_masked(x, MASK),
    masked_sum: lambda x, y, s: masked_sum(x, MASK, dim=1),
    masked_mean: lambda x, y, s: masked_mean(x, MASK, dim=1),
    whiten: lambda x, y, s: whiten(x, MASK),
    gae: lambda x, y, s: gae(x, y, MASK, gamma=0.5, gae_lambda=0.5, bootstrap_values=s),
    discounted_returns: lambda x, y, s: discounted_returns(x, MASK, gamma=0.5),
    remax_advantages: lambda x, y, s: remax_advantages(x, s, MASK),
    broadcast_to_tokens: lambda x, y, s: broadcast_to_tokens(s, MASK),
    token_covariance: lambda x, y, s: token_covariance(x, y, MASK),
    select_kl_cov: lambda x, y, s: select_kl_cov(x, MASK, fraction=0.3),
    select_clip_cov: lambda x, y, s: select_clip_cov(x, MASK, ROWS, fraction=0.3, lower=-1.0, upper=2.5, seed=0),
    mean_metric: lambda x, y, s: mean_metric("x", x, MASK),
    finite_mean_metric: lambda x, y, s: finite_mean_metric("x", x),
    policy_movement: lambda x, y, s: policy_movement(x, MASK),
    sample_entropy: lambda x, y, s: sample_entropy(x, MASK),
    explained_variance: lambda x, y, s: explained_variance(x, y, MASK),
    teacher_advantages: lambda x, y, s: teacher_advantages(x, y, MASK),
    reverse_kl_losses: lambda x, y, s: reverse_kl_losses(x, y, MASK),
    forward_kl_top_k: lambda x, y, s: forward_kl_top_k(x[..., None], y[..., None], MASK),
    group_statistics: lambda x, y, s: vars(group_statistics(s, GROUPS)),
    group_relative: lambda x, y, s: group_relative(s, GROUPS, scale_by_std=True),
    leave_one_out: lambda x, y, s: leave_one_out(s, GROUPS),
    optimal_baseline: lambda x, y, s: optimal_baseline(s, GROUPS, tensor([3, 2, 3])),
    group_policy_gradient: lambda x, y, s: group_policy_gradient(s, GROUPS),
    pass_at_k_advantages: lambda x, y, s: pass_at_k_advantages(s, GROUPS, k=2),
    groups_with_signal: lambda x, y, s: groups_with_signal(s, GROUPS),
    rows_with_signal: lambda x, y, s: rows_with_signal(s, GROUPS),
    clamp_log_ratio: lambda x, y, s: clamp_log_ratio(x),
    kl_per_token: lambda x, y, s: [
        kl_per_token(x, y, MASK, estimator=name) for name in ("k1", "k2", "k3", "k3-straight-through")
    ],
    aggregate_loss: lambda x, y, s: aggregate_loss(
        x, MASK, aggregation="seq-mean-token-mean", num_response_tokens=8, num_sequences=3
    ),
    value_losses: lambda x, y, s: value_losses(x, y, 2 * y, MASK, value_clip=0.2)[0],
    rollout_correction: lambda x, y, s: [
        rollout_correction(x, y, MASK, mode=mode, lower=0.25, upper=2.0) for mode in CORRECTIONS
    ],
    masked_log_ratio: lambda x, y, s: masked_log_ratio(x, y, MASK),
    ppo_loss: lambda x, y, s: ppo_loss(x, y, x, MASK, **CLIP, clip_ratio_dual=3.0),
    decoupled_ppo_loss: lambda x, y, s: decoupled_ppo_loss(x, y, x, MASK, rollout_log_probs=x, **CLIP),
    gspo_loss: lambda x, y, s: gspo_loss(x, y, x, MASK, **CLIP),
    gmpo_loss: lambda x, y, s: gmpo_loss(x, y, x, MASK, **CLIP),
    cispo_loss: lambda x, y, s: cispo_loss(x, y, x, MASK, **CLIP),
    sapo_loss: lambda x, y, s: sapo_loss(x, y, x, MASK),
    gpg_loss: lambda x, y, s: gpg_loss(x, y, x, MASK),
    clip_cov_loss: lambda x, y, s: clip_cov_loss(x, y, x, MASK, selected_mask=~MASK, **CLIP),
    kl_cov_loss: lambda x, y, s: kl_cov_loss(x, y, x, MASK, selected_mask=MASK, covariance_kl_coef=0.5),
    importance_weighted_loss: lambda x, y, s: importance_weighted_loss(x, y, x, MASK),
    supervised_objective: lambda x, y, s: supervised_objective(x, None, TD),
    preference_loss: lambda x, y, s: preference_loss(s, s.flip(0), COUNT),
    preference_objective: lambda x, y, s: preference_objective(s, s.flip(0), TD),
    spread_scores: lambda x, y, s: spread_scores(s, MASK),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_whole_numbers_and_truth_values_give_what_floats_give(function: Callable[..., Any]) -> None:
    call = CALLS[function]
    for given in ((X, Y, SCORES), (X > 0, Y > 0, SCORES > 0)):
        expected = call(*(x.float() for x in given))
        torch.testing.assert_close(call(*given), expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_every_function_that_takes_numbers_is_asked() -> None:
    folder = Path(__file__).parents[3] / "tasks" / "algorithms"
    modules = [importlib.import_module(f"tasks.algorithms.{path.stem}") for path in sorted(folder.glob("[a-z]*.py"))]
    asked = {function.__name__ for function in CALLS}
    takes = {
        name
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and function.__module__ == module.__name__
        and any("Number[" in str(p.annotation) for p in inspect.signature(function).parameters.values())
    }
    assert takes == asked
    assert {loss.__name__ for loss in POLICY_LOSSES.values()} <= asked


def test_a_discount_of_whole_rewards_is_not_cut_off() -> None:
    returns = discounted_returns(tensor([[0, 0, 1]]), tensor([[True, False, True]]), gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0]]


def test_whole_scores_and_whole_values_are_estimated_in_fractions() -> None:
    columns = {
        "response_mask": tensor([[True, False, True], [True, True, False]]),
        "scores": tensor([1, 0]),
        "group_ids": tensor([0, 1]),
        "values": tensor([[1, 9, 0], [1, 0, 9]]),
    }
    knobs: dict[str, Any] = {"gamma": 0.5, "whiten_advantages": False, "scale_by_std": False}
    new, _ = estimate_advantages(columns, estimator="reinforce_plus_plus", gae_lambda=1.0, **knobs)
    assert new["advantages"].tolist() == [[0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]
    new, metrics = estimate_advantages(columns, estimator="ppo", gae_lambda=0.5, **knobs)
    # Row 0: 1 - 0 at its end, and 0.5 * 0 - 1 + 0.25 * 1 before it. Row 1: 0, and 0.5 * 0 - 1.
    assert new["advantages"].tolist() == [[-0.75, 0.0, 1.0], [-1.0, 0.0, 0.0]]
    assert new["returns"].tolist() == [[0.25, 0.0, 1.0], [0.0, 0.0, 0.0]]
    # Squares about the mean of the returns 1/4, 1, 0, 0: 43/64; of the errors -3/4, 1, -1, 0: 155/64.
    assert float(metrics["critic/explained_variance"]) == pytest.approx(1 - 155 / 43)


def test_whitened_whole_numbers_keep_their_fractions() -> None:
    assert whiten(tensor([0, 1, 2]), tensor([True, True, True]), eps=0.0).tolist() == [-1.0, 0.0, 1.0]
    half = whiten(tensor([0, 0, 3]), tensor([True, True, True]), eps=0.0)
    torch.testing.assert_close(half, tensor([-1.0, -1.0, 2.0]) / 3**0.5)


def test_the_explained_variance_refuses_a_mask_of_whole_numbers_as_the_sums_do() -> None:
    """Outside of tests nothing looks at annotations; taken for places, such a mask gave a number."""
    with pytest.raises(RuntimeError, match="BoolTensor"):
        inspect.unwrap(explained_variance)(X.float(), Y.float(), MASK.long())
