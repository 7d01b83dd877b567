import math

import pytest
import torch
from torch import Tensor, tensor

from tasks.algorithms.advantage_step import columns_read, estimate_advantages
from tasks.algorithms.diagnostics import finish_metrics
from tasks.algorithms.estimators import ESTIMATORS
from tasks.algorithms.policy_losses import POLICY_LOSSES

NAN = math.nan
NEUTRAL = {"gamma": 1.0, "gae_lambda": 1.0, "whiten_advantages": False, "scale_by_std": False}


def batch() -> dict[str, Tensor]:
    """Two prompts with two responses each; nan wherever nothing may be read."""
    mask = tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)

    def column() -> Tensor:
        return torch.randn(4, 4, generator=generator).masked_fill(~mask, NAN)

    old = column() - 2
    return {
        "response_mask": mask,
        "scores": tensor([1.0, 0.0, 0.5, 0.25]),
        "group_ids": tensor([3, 3, 8, 8]),
        "row_ids": tensor([0, 1, 2, 3]),
        "finish_reasons": tensor([0, 1, 0, 1], dtype=torch.int8),
        "values": column(),
        "old_log_probs": old,
        "ref_log_probs": old + 0.1 * column(),
        "rollout_log_probs": old + 0.1 * column(),
        "teacher_log_probs": old + 0.1 * column(),
        "baseline_scores": tensor([0.5, 0.5, 0.25, 0.25]),
        "bootstrap_values": tensor([NAN, 1.0, NAN, 2.0]),
    }


def test_every_algorithm_has_an_estimator_and_a_loss() -> None:
    assert ESTIMATORS.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_finite_zero_off_the_mask_and_blind_to_the_order_of_rows(estimator: str) -> None:
    columns = batch()
    arguments = NEUTRAL | {"estimator": estimator, "whiten_advantages": True, "kl_in_reward": True, "kl_coef": 0.1}
    new, _ = estimate_advantages(columns, **arguments)
    order = tensor([2, 0, 3, 1])
    shuffled, _ = estimate_advantages({name: column[order] for name, column in columns.items()}, **arguments)
    assert new["advantages"].isfinite().all()
    assert not new["advantages"][~columns["response_mask"]].any()
    for name, column in new.items():
        torch.testing.assert_close(shuffled[name], column[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_unscorable_row_is_not_trained_whatever_the_estimator(estimator: str) -> None:
    columns = batch() | {"scores": tensor([1.0, NAN, 0.5, 0.25])}
    new, metrics = estimate_advantages(columns, estimator=estimator, **NEUTRAL)
    assert new["train_mask"].any(dim=1).tolist() == [True, False, True, True]
    assert not new["advantages"][1].any()
    assert not new["token_rewards"][1].any()
    assert finish_metrics(metrics)["reward/unscorable_rows"] == 1.0
    assert finish_metrics(metrics)["reward/score_mean"] == pytest.approx(1.75 / 3)


def test_gae_with_kl_in_the_reward_by_hand() -> None:
    columns = {
        "response_mask": tensor([[True, True]]),
        "scores": tensor([1.0]),
        "group_ids": tensor([0]),
        "values": tensor([[0.5, 0.25]]),
        "old_log_probs": tensor([[-1.0, -1.0]]),
        "ref_log_probs": tensor([[-1.5, -0.5]]),
    }
    new, metrics = estimate_advantages(
        columns, estimator="ppo", kl_in_reward=True, kl_coef=0.2, **NEUTRAL | {"gae_lambda": 0.5}
    )
    assert new["token_rewards"].tolist() == [pytest.approx([-0.1, 1.1])]
    assert new["advantages"].tolist() == [pytest.approx([-0.1 + 0.25 - 0.5 + 0.5 * 0.85, 0.85])]
    assert new["returns"].tolist() == [pytest.approx([0.575, 1.1])]
    assert finish_metrics(metrics)["actor/reference_kl"] == pytest.approx(0.0)


def test_kl_in_the_reward_reaches_estimators_of_whole_responses_as_a_sum() -> None:
    columns = batch()
    new, _ = estimate_advantages(columns, estimator="dr_grpo", kl_in_reward=True, kl_coef=0.5, **NEUTRAL)
    kl = (columns["old_log_probs"] - columns["ref_log_probs"]).nan_to_num(0.0).sum(dim=1)
    reward = columns["scores"] - 0.5 * kl
    expected = reward - reward.view(2, 2).mean(dim=1).repeat_interleave(2)
    torch.testing.assert_close(new["advantages"].sum(dim=1) / new["train_mask"].sum(dim=1), expected)
    assert "returns" not in new


def test_rows_without_tokens_do_not_dilute_the_kl_that_drives_the_controller() -> None:
    mask = torch.ones(8, 2, dtype=torch.bool)
    mask[6:] = False
    columns = {
        "response_mask": mask,
        "scores": torch.zeros(8),
        "group_ids": torch.zeros(8, dtype=torch.long),
        "old_log_probs": torch.full((8, 2), -1.0).masked_fill(~mask, NAN),
        "ref_log_probs": torch.full((8, 2), -1.2),
    }
    _, metrics = estimate_advantages(columns, estimator="grpo", **NEUTRAL)
    assert finish_metrics(metrics)["actor/reference_kl"] == pytest.approx(0.4)
    assert metrics["actor/reference_kl"] / 8 == pytest.approx(0.3), "the diluted signal"
    assert finish_metrics(metrics)["reward/rows_without_tokens"] == 2.0


def test_only_cut_responses_are_bootstrapped() -> None:
    columns, arguments = batch(), {"estimator": "ppo", **NEUTRAL}
    plain, _ = estimate_advantages(columns, **arguments)
    booted, _ = estimate_advantages(columns, bootstrap_truncated=True, **arguments)
    gain = (booted["advantages"] - plain["advantages"])[columns["response_mask"]]
    torch.testing.assert_close(gain, tensor([0.0] * 3 + [1.0] * 2 + [0.0] * 2 + [2.0] * 3))


def test_reinforce_plus_plus_baseline_centres_the_group_and_whitens_the_batch() -> None:
    columns = batch()
    new, _ = estimate_advantages(
        columns, estimator="reinforce_plus_plus_baseline", **NEUTRAL | {"whiten_advantages": True}
    )
    centred = tensor([0.5, -0.5, 0.125, -0.125])[:, None].expand(4, 4)
    values = centred[columns["response_mask"]]
    expected = (values - values.mean()) / values.std()
    torch.testing.assert_close(new["advantages"][columns["response_mask"]], expected, atol=1e-5, rtol=0)


def test_a_rejecting_correction_shrinks_the_trained_mask_and_not_the_credit() -> None:
    columns = batch()
    columns["rollout_log_probs"] = columns["old_log_probs"].clone()
    columns["rollout_log_probs"][0, 2] -= 9.0
    arguments = {"estimator": "ppo", **NEUTRAL}
    plain, _ = estimate_advantages(columns, **arguments)
    kept, metrics = estimate_advantages(
        columns, correction="icepop", correction_lower=0.5, correction_upper=2.0, **arguments
    )
    rejected = plain["train_mask"] & ~kept["train_mask"]
    assert rejected.nonzero().tolist() == [[0, 2]]
    assert torch.equal(kept["advantages"][~rejected], plain["advantages"][~rejected])
    assert kept["correction_weights"][0, 2] == 0.0
    assert finish_metrics(metrics)["rollout/rejected_fraction"] == pytest.approx(0.1)


def test_pure_distillation_needs_no_scores_and_mixed_adds_the_teacher_to_the_task() -> None:
    columns = batch()
    pull = (columns["teacher_log_probs"] - columns["old_log_probs"]).nan_to_num(0.0)
    bare = {name: columns[name] for name in ("response_mask", "old_log_probs", "teacher_log_probs")}
    pure, _ = estimate_advantages(bare, estimator="distillation", **NEUTRAL)
    torch.testing.assert_close(pure["advantages"], pull)
    task, _ = estimate_advantages(columns, estimator="grpo", **NEUTRAL)
    mixed, _ = estimate_advantages(columns, estimator="grpo", teacher_coef=0.5, **NEUTRAL)
    torch.testing.assert_close(mixed["advantages"], task["advantages"] + 0.5 * pull)


def test_the_covariance_algorithms_select_trained_tokens() -> None:
    columns = batch()
    for estimator in ("clip_cov", "kl_cov"):
        new, _ = estimate_advantages(columns, estimator=estimator, covariance_fraction=0.3, **NEUTRAL)
        assert (new["selected_mask"] & ~new["train_mask"]).sum() == 0
    assert new["selected_mask"].sum() == 3


def test_nothing_scorable_gives_zeros_and_a_count_and_no_nan() -> None:
    columns = batch() | {"scores": torch.full((4,), NAN)}
    new, metrics = estimate_advantages(columns, estimator="ppo", **NEUTRAL | {"whiten_advantages": True})
    finished = finish_metrics(metrics)
    assert not new["advantages"].any()
    assert not new["train_mask"].any()
    assert finished["reward/unscorable_rows"] == 4.0
    assert "reward/score_mean" not in finished
    assert "critic/explained_variance" not in finished


def test_groups_with_signal_are_counted_by_group() -> None:
    columns = batch() | {"scores": tensor([1.0, 1.0, 0.5, 0.25])}
    _, metrics = estimate_advantages(columns, estimator="grpo", **NEUTRAL)
    assert finish_metrics(metrics)["reward/groups_with_signal"] == 0.5
    assert metrics["reward/groups_with_signal/count"] == 2


def test_a_nan_at_a_sampled_token_is_refused_with_its_place() -> None:
    columns = batch()
    columns["values"][2, 3] = NAN
    with pytest.raises(ValueError, match=r"column 'values' is nan at row 2, token 3 \(1 tokens in all\)"):
        estimate_advantages(columns, estimator="ppo", **NEUTRAL)
    estimate_advantages(columns, estimator="grpo", **NEUTRAL)  # does not read it


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    columns = batch() | {"scores": tensor([math.inf, 0.0, 0.5, 0.25])}
    with pytest.raises(ValueError, match="column 'advantages' is not finite at row 0"):
        estimate_advantages(columns, estimator="reinforce_plus_plus", **NEUTRAL)


def test_missing_or_misshapen_columns_are_named() -> None:
    columns = batch()
    with pytest.raises(ValueError, match=r"lacks columns \['values'\]"):
        estimate_advantages({k: v for k, v in columns.items() if k != "values"}, estimator="ppo", **NEUTRAL)
    with pytest.raises(ValueError, match=r"'ref_log_probs' has shape \(16, 4\); response_mask has \(4, 4\)"):
        estimate_advantages(columns | {"ref_log_probs": torch.zeros(16, 4)}, estimator="grpo", **NEUTRAL)
    with pytest.raises(ValueError, match="'a2c'; known are"):
        columns_read(estimator="a2c")


def test_segments_of_one_rollout_count_as_one_score_in_the_baseline_and_in_the_mean() -> None:
    mask = torch.ones(4, 2, dtype=torch.bool)
    columns = {
        "response_mask": mask,
        "scores": tensor([1.0, 0.0, 0.0, 0.0]),
        "group_ids": torch.zeros(4, dtype=torch.long),
        "rollout_ids": tensor([10, 11, 11, 11]),
    }
    new, metrics = estimate_advantages(columns, estimator="dr_grpo", **NEUTRAL)
    assert new["advantages"].tolist() == [[0.5, 0.5], [-0.5, -0.5], [-0.5, -0.5], [-0.5, -0.5]]
    assert finish_metrics(metrics)["reward/score_mean"] == pytest.approx(0.5)


@pytest.mark.parametrize("estimator", ["ppo", "grpo", "reinforce_plus_plus"])
def test_a_batch_of_no_rows_has_no_advantages(estimator: str) -> None:
    nothing = {name: column[:0] for name, column in batch().items()}
    new, metrics = estimate_advantages(nothing, estimator=estimator, **NEUTRAL | {"whiten_advantages": True})
    assert new["advantages"].shape == (0, 4)
    assert "reward/score_mean" not in finish_metrics(metrics)


def test_the_gap_to_the_engine_is_told_without_a_correction_and_changes_nothing() -> None:
    columns = batch() | {"old_log_probs": torch.full((4, 4), -2.0), "rollout_log_probs": torch.full((4, 4), -2.0)}
    columns["rollout_log_probs"][0, 1] = -2.9  # one of ten sampled tokens
    columns["rollout_log_probs"][0, 0] = 50.0  # of a prompt
    new, metrics = estimate_advantages(columns, estimator="rloo", **NEUTRAL)
    assert finish_metrics(metrics)["rollout/log_prob_gap"] == pytest.approx(0.09)
    assert new["train_mask"].equal(columns["response_mask"])
    assert "correction_weights" not in new
