"""What happens to scores before the estimator and to rows after it."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from resources.batch import make_shard, ragged_from_values, to_padded
from tasks.algorithms.advantage_step import estimate_advantages
from tasks.on_rows import Shaping, advantages_of_rows

SETTINGS = {"gamma": 1.0, "gae_lambda": 1.0, "whiten_advantages": False, "scale_by_std": False}


def rows(scores: list[float], versions: list[int], **columns: torch.Tensor) -> TensorDict:
    """Two groups of two rows; a prompt of one token, responses of two tokens each."""
    lengths = torch.full((4,), 3)
    mask = torch.tensor([False, True, True] * 4)
    return make_shard(
        {
            "row_ids": torch.arange(4),
            "group_ids": torch.tensor([0, 0, 1, 1]),
            "response_mask": ragged_from_values(mask, lengths),
            "response_lengths": torch.tensor([2, 2, 2, 2]),
            "policy_versions": torch.tensor(versions),
            "scores": torch.tensor(scores),
            **columns,
        }
    )


def test_rows_above_the_bound_are_not_trained_and_still_count_in_the_baseline():
    fn = partial(estimate_advantages, estimator="rloo", **SETTINGS)
    shaping = Shaping(policy_version=5, max_staleness=1)
    metrics, new = advantages_of_rows(rows([1.0, 0.0, 1.0, 0.0], [5, 4, 3, 5]), estimator=fn, shaping=shaping)
    assert to_padded(new.get("train_mask")).any(dim=1).tolist() == [True, True, False, True]
    assert to_padded(new.get("advantages"))[:, 1].tolist() == [1.0, -1.0, 0.0, -1.0]
    assert metrics["rollout/staleness"] / metrics["rollout/staleness/count"] == pytest.approx((0 + 1 + 2 + 0) / 4)
    assert (metrics["rollout/staleness/max"], metrics["rollout/stale_rows"]) == (2.0, 1.0)


def test_without_a_bound_every_row_is_trained():
    fn = partial(estimate_advantages, estimator="rloo", **SETTINGS)
    metrics, new = advantages_of_rows(
        rows([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]), estimator=fn, shaping=Shaping(policy_version=9)
    )
    assert to_padded(new.get("train_mask"))[:, 1:].all()
    assert "rollout/stale_rows" not in metrics


def test_the_penalty_changes_advantages_and_is_told_apart_from_the_score():
    fn = partial(estimate_advantages, estimator="dr_grpo", **SETTINGS)
    batch = rows([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0])
    batch["response_lengths"] = torch.tensor([2, 4, 2, 2])  # the longest is two tokens into a buffer of two
    shaping = Shaping(overlong=(4, 2, 1.0))
    metrics, new = advantages_of_rows(batch, estimator=fn, shaping=shaping)
    assert to_padded(new.get("advantages"))[:, 1].tolist() == [0.5, -0.5, 0.0, 0.0]
    assert metrics["reward/overlong_penalty"] == -1.0
    assert metrics["reward/penalised_score_mean"] / metrics["reward/penalised_score_mean/count"] == 0.25
    assert metrics["reward/score_mean"] / metrics["reward/score_mean/count"] == 0.5


def test_scores_that_were_rescaled_do_not_go_by_the_name_of_the_graders_scores():
    fn = partial(estimate_advantages, estimator="dr_grpo", **SETTINGS)
    metrics, _ = advantages_of_rows(
        rows([2.0, 0.0, 2.0, 0.0], [0] * 4), estimator=fn, shaping=Shaping(is_rescaled=True)
    )
    assert metrics["reward/shaped_score_mean"] / metrics["reward/shaped_score_mean/count"] == 1.0
    assert "reward/score_mean" not in metrics


def test_a_row_whose_greedy_baseline_is_unscorable_is_left_out():
    fn = partial(estimate_advantages, estimator="remax", **SETTINGS)
    batch = rows([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0], baseline_scores=torch.tensor([0.5, 0.5, torch.nan, torch.nan]))
    metrics, new = advantages_of_rows(batch, estimator=fn, shaping=Shaping())
    assert to_padded(new.get("advantages"))[:, 2].tolist() == [0.5, -0.5, 0.0, 0.0]
    assert not to_padded(new.get("train_mask"))[2:].any()
    assert metrics["reward/unscorable_rows"] == 2.0
