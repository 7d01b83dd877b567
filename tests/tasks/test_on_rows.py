"""Ragged rows around the pure algorithms: the napkin example of the README, and order that never matters."""

from functools import partial

import torch
from tensordict import TensorDict

from resources.batch import BRANCH_STRIDE, make_shard, ragged_from_rows, select_rows, to_padded
from resources.engines.base import FinishReason
from resources.micro_batches import Siblings
from tasks.algorithms.advantage_step import estimate_advantages
from tasks.on_rows import advantages_of_rows, update_facts


def two_siblings() -> TensorDict:
    """Prompt [11, 12] with responses [21, 22, 2] (score 1) and [23, 2] (score 0)."""
    return make_shard(
        {
            "row_ids": torch.tensor([4, 5]),
            "group_ids": torch.tensor([2, 2]),
            "scores": torch.tensor([1.0, 0.0]),
            "response_mask": ragged_from_rows([torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])], torch.bool),
        }
    )


centred = partial(
    estimate_advantages, estimator="dr_grpo", gamma=1.0, gae_lambda=1.0, whiten_advantages=False, scale_by_std=False
)


def test_siblings_get_their_distance_to_the_group_mean_on_their_own_tokens():
    _, shard = advantages_of_rows(two_siblings(), estimator=centred)
    assert to_padded(shard["advantages"]).tolist() == [[0, 0, 0.5, 0.5, 0.5], [0, 0, -0.5, -0.5, 0]]


def test_the_branches_of_one_rollout_have_one_vote_together():
    rows = make_shard(
        {
            "row_ids": torch.tensor([4, 5, 5 + BRANCH_STRIDE, 5 + 2 * BRANCH_STRIDE]),
            "group_ids": torch.tensor([2, 2, 2, 2]),
            "scores": torch.tensor([1.0, 0.0, 0.0, 0.0]),
            "response_mask": ragged_from_rows([torch.tensor([0, 1])] * 4, torch.bool),
        }
    )
    _, shard = advantages_of_rows(rows, estimator=centred)
    assert to_padded(shard["advantages"])[:, 1].tolist() == [0.5, -0.5, -0.5, -0.5], "one vote a row would give 0.75"


def test_the_order_of_rows_changes_no_bit():
    rows = two_siblings()
    _, forward = advantages_of_rows(rows, estimator=centred)
    _, backward = advantages_of_rows(select_rows(rows, [5, 4]), estimator=centred)
    assert torch.equal(forward["row_ids"], backward["row_ids"])
    assert torch.equal(forward["advantages"].values(), backward["advantages"].values())


def test_an_unscorable_row_has_nothing_to_train():
    rows = two_siblings()
    rows["scores"] = torch.tensor([float("nan"), 0.0])
    _, shard = advantages_of_rows(rows, estimator=centred)
    assert to_padded(shard["train_mask"]).sum(dim=1).tolist() == [0, 2]


def test_a_response_that_was_given_up_takes_its_group_along_and_is_counted():
    three = make_shard(
        {
            "row_ids": torch.tensor([4, 5, 6, 7]),
            "group_ids": torch.tensor([2, 2, 3, 3]),
            "scores": torch.tensor([0.0, 1.0, 0.0, 1.0]),
            "finish_reasons": torch.tensor([FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT, 0]),
            # Row 4 has no token; row 6 was cut by an update of the weights and keeps what it has.
            "response_mask": ragged_from_rows(
                [torch.tensor(row) for row in ([0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1, 1])], torch.bool
            ),
        }
    )
    metrics, shard = advantages_of_rows(three, estimator=centred)
    assert to_padded(shard["train_mask"]).sum(dim=1).tolist() == [0, 0, 1, 2]
    assert metrics["rollout/dropped_groups"] == 1.0


def test_update_facts_count_tokens_and_trained_tokens_by_row_id():
    rows = make_shard(
        {
            "row_ids": torch.tensor([9, 3]),
            "group_ids": torch.tensor([4, 1]),
            "train_mask": ragged_from_rows([torch.tensor([0, 1, 1]), torch.tensor([0, 0])], torch.bool),
        }
    )
    assert update_facts(rows) == ([3, 9], [2, 3], [0, 2], Siblings(groups=[1, 4], prompts=[0, 1]))
