"""A response that nobody answered is no wrong answer: in validation, a baseline, a group or a deviation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from resources.batch import make_shard
from resources.engines.base import FinishReason, GenerationOutput
from tasks.dynamic_sampling import NoSignalError, _baselines
from tasks.host import call_step, use_host
from tasks.reward import reward
from tasks.rollout import rollout
from tests.tasks.local_cast import SmallCast, small_config
from tests.tasks.local_run import LocalRun

RIGHT = {"mode": "answer", "accuracy": 1.0}


def losing(cast: SmallCast, is_lost: Callable[[int], bool], *overrides: str, script: Any = None) -> LocalRun:
    """A run whose engine has no answer for some rows, as servers have none for a request past its deadline."""
    run = cast.run(small_config(*overrides, script=script), fresh=["rollout"])
    engine = run.context.groups["rollout"].workers[0].engine
    answer = engine.generate

    def generate(requests: Any, sampling: Any, on_finished: Any = None) -> list[GenerationOutput]:
        outputs = [
            GenerationOutput(row_id=output.row_id, token_ids=(), log_probs=(), finish_reason=FinishReason.ABORT)
            if is_lost(output.row_id)
            else output
            for output in answer(requests, sampling)
        ]
        if on_finished is not None:
            on_finished(outputs)
        return outputs

    engine.generate = generate
    return run


def test_validation_leaves_them_out_and_says_how_many(small_cast: SmallCast):
    metrics = losing(small_cast, lambda row: row in (0, 1), script=RIGHT).validate()
    assert (metrics["validation/accuracy"], metrics["validation/sampled_accuracy"]) == (1.0, 1.0)
    assert metrics["validation/accuracy/lost_responses"] == 2.0
    assert metrics["validation/sampled_accuracy/lost_responses"] == 2.0


def test_validation_in_which_every_response_came_speaks_of_none_that_was_lost(small_cast: SmallCast):
    metrics = small_cast.run(small_config()).validate()
    assert not [name for name in metrics if name.endswith(("lost_responses", "failed_episodes"))]


def test_a_group_with_one_of_them_has_no_signal(small_cast: SmallCast):
    """Scores [1, 1, 1, lost] differ in nothing."""
    run = losing(small_cast, lambda row: row % 4 == 3, "algorithm.name=dapo", script=RIGHT)
    with pytest.raises(NoSignalError, match=r"the mean score was 1; 48 groups were dropped for a response that no eng"):
        run.iterate()


def test_dynamic_sampling_refills_a_group_with_one_of_them_whatever_its_others_scored(small_cast: SmallCast):
    """24 of the 32 responses to prompt 1 were answered, some right and some wrong."""
    run = losing(small_cast, lambda row: 32 <= row < 40, "algorithm.name=dapo", "rollout.group_size=32")
    metrics = run.iterate()
    assert metrics["rollout/dropped_groups"] == 1.0
    assert metrics["rollout/groups_kept"] == 8.0
    assert metrics["rollout/groups_sampled"] > 8.0
    assert metrics["reward/unscorable_lost"] == 8.0
    assert metrics["reward/unscorable_rows"] == 0.0


def test_a_greedy_response_that_is_lost_is_no_baseline_of_zero(small_cast: SmallCast):
    """Greedy rows are -1 - prompt: the four responses to prompt 2 have nothing to be compared with."""
    run = losing(
        small_cast, lambda row: row == -3, "algorithm.name=remax", "algorithm.kl.coef=0.0", script=RIGHT
    )  # fmt: skip
    metrics = run.iterate()
    assert metrics["rollout/missing_baselines"] == 1.0
    assert metrics["rollout/greedy_score_mean"] == 1.0
    assert metrics["reward/unscorable_rows"] == 4.0
    assert metrics["advantage/magnitude"] == 0.0


def test_a_prompt_whose_greedy_episode_failed_has_no_baseline_and_the_others_keep_theirs():
    rows = make_shard({"row_ids": torch.arange(4), "group_ids": torch.tensor([7, 7, 8, 8])})
    metrics, shard = _baselines(rows, by_group={7: 0.5})
    assert shard["baseline_scores"][:2].tolist() == [0.5, 0.5]
    assert bool(shard["baseline_scores"][2:].isnan().all())
    assert metrics["rollout/greedy_score_mean"] / metrics["rollout/greedy_score_mean/count"] == 0.5
    assert metrics["rollout/missing_baselines"] == 1.0


def test_they_do_not_widen_the_deviation_that_scores_are_divided_by(small_cast: SmallCast):
    run = losing(small_cast, lambda row: row == 5, "algorithm.name=rloo", script=RIGHT)
    with use_host(run.context):
        at = run.state.stamp(run.config, 1)
        metrics = call_step(reward, at, call_step(rollout, at, at.policy_version)).metrics
        run.store.drop(at.batch_id)
    assert (metrics["reward/score_mean"], metrics["reward/score_std"]) == (1.0, 0.0)
    assert metrics["reward/unscorable_lost"] == 1.0
