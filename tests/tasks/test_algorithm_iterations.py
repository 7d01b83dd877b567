"""Every algorithm of the config runs through the real steps; what needs scores while sampling gets them."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from configs.algorithm_defaults import AlgorithmName
from configs.problems import ConfigError
from tasks.actor import actor_log_probs
from tasks.advantage import advantage
from tasks.critic import critic_values
from tasks.dynamic_sampling import NoSignalError
from tasks.host import call_step, host, use_host
from tasks.reward import reward
from tasks.rollout import rollout
from tests.tasks.local_cast import SmallCast, small_config

LEARNED = [name for name in get_args(AlgorithmName) if name != "distillation"]


@pytest.mark.parametrize("name", LEARNED)
def test_an_iteration_of_the_algorithm_moves_the_policy(small_cast: SmallCast, name: str):
    metrics = small_cast.run(small_config(f"algorithm.name={name}")).iterate()
    assert metrics["actor/optimizer_steps"] >= 2
    assert metrics["actor/skipped_steps"] == 0
    assert math.isfinite(metrics["actor/loss"])
    assert metrics["actor/grad_norm"] > 0.0
    assert metrics["actor/approx_kl"] > 0.0
    assert ("critic/loss" in metrics) == (name in ("ppo", "decoupled_ppo"))


def test_the_actor_takes_no_step_while_only_the_critic_learns(small_cast: SmallCast):
    run = small_cast.run(small_config("algorithm.critic_warmup_iterations=1"))
    first, second = run.iterate(), run.iterate()
    assert "actor/loss" not in first
    assert "critic/loss" in first
    assert {"actor/loss", "critic/loss"} < set(second)


def test_prompts_of_an_engine_that_does_not_answer_end_the_step(small_cast: SmallCast):
    run = small_cast.run(small_config("algorithm.name=rloo"), fresh=["rollout"])
    run.context.groups["rollout"].workers[0].num_engines = 2  # the other half is another engine's, and there is none
    with pytest.raises(ValueError, match="8 prompts were to be sampled and the engines that answered took 4"):
        run.iterate()


def test_remax_subtracts_the_score_of_the_greedy_response(small_cast: SmallCast):
    run = small_cast.run(small_config("algorithm.name=remax", "algorithm.kl.coef=0.0"))
    metrics = run.iterate()
    # The scripted engine's greedy answers draw from one stream: all right, or all wrong.
    assert metrics["rollout/greedy_score_mean"] in (0.0, 1.0)
    off = metrics["reward/score_mean"] - metrics["rollout/greedy_score_mean"]
    assert metrics["advantage/magnitude"] == pytest.approx(abs(off))


def test_dynamic_sampling_keeps_groups_with_signal_alone_and_refills(small_cast: SmallCast):
    config = small_config("algorithm.name=dapo", "data.prompts_per_iteration=32", "rollout.group_size=2")
    metrics = small_cast.run(config).iterate()
    assert metrics["reward/groups_with_signal"] == 1.0
    assert metrics["rollout/groups_kept"] == 32
    assert metrics["rollout/groups_sampled"] > 32
    assert metrics["rollout/refill_rounds"] >= 1
    assert metrics["reward/score_mean"] == 0.5  # one of two right, in every group


def test_dynamic_sampling_trains_on_what_there_is_when_the_bound_is_reached(small_cast: SmallCast):
    config = small_config(
        "algorithm.name=dapo",
        "data.prompts_per_iteration=32",
        "rollout.group_size=2",
        "algorithm.dynamic_sampling.max_rounds=1",
    )
    metrics = small_cast.run(config).iterate()
    assert metrics["rollout/refill_rounds"] == 1
    assert 0 < metrics["rollout/groups_kept"] <= 32


def test_the_prompts_after_a_refill_are_the_ones_that_were_not_sampled(small_cast: SmallCast):
    run = small_cast.run(small_config("algorithm.name=dapo", "data.prompts_per_iteration=32", "rollout.group_size=2"))
    metrics = run.iterate()
    assert run.state.start == metrics["rollout/groups_sampled"]


def test_a_task_without_signal_ends_with_a_message(small_cast: SmallCast):
    config = small_config("algorithm.name=dapo", script={"mode": "answer", "accuracy": 1.0})
    run = small_cast.run(config, fresh=["rollout"])
    with pytest.raises(
        NoSignalError, match=r"none of 48 groups in 6 rounds had scores that differ \(the mean score was 1"
    ):
        run.iterate()


def test_the_overlong_penalty_is_in_the_advantages_and_not_in_the_score(small_cast: SmallCast):
    # Answers have six tokens; the buffer of four before eight begins at four: two of four into it.
    config = small_config(
        "algorithm.name=dr_grpo", "algorithm.overlong={max_length: 8, buffer: 4, factor: 1.0}", "algorithm.kl.coef=0.0"
    )
    metrics = small_cast.run(config).iterate()
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.5)
    assert metrics["reward/penalised_score_mean"] == pytest.approx(metrics["reward/score_mean"] - 0.5)


def test_the_whole_recipe_of_dapo_tells_the_score_without_the_penalty(small_cast: SmallCast):
    config = small_config("algorithm.name=dapo", "algorithm.overlong={max_length: 8, buffer: 4, factor: 1.0}")
    metrics = small_cast.run(config).iterate()
    assert 0.0 < metrics["reward/score_mean"] < 1.0
    assert metrics["reward/penalised_score_mean"] == pytest.approx(metrics["reward/score_mean"] - 0.5)


@pytest.mark.parametrize("setting", ["normalise=true", "clip=0.25"])
def test_the_score_is_told_as_the_graders_gave_it_whatever_is_trained_on(small_cast: SmallCast, setting: str):
    run = small_cast.run(small_config("algorithm.name=rloo", f"reward.{setting}"), fresh=["reward"])
    metrics = run.iterate()
    run.context.groups["reward"].call("close")
    right = metrics["reward/score_mean"]
    assert metrics["reward/source/sorting/score_mean"] == right
    deviation = (right * (1 - right)) ** 0.5  # scores are 0 or 1
    assert metrics["reward/score_std"] == pytest.approx(deviation)
    wanted = right / deviation if setting == "normalise=true" else 0.25 * right
    assert metrics["reward/shaped_score_mean"] == pytest.approx(wanted, rel=1e-5)


def test_scoring_update_and_reference_share_the_temperature_of_the_engine(small_cast: SmallCast):
    """With one of them at temperature 1 the ratio before the first step, or the first KL, would not be of equals."""
    config = small_config("rollout.sampling.temperature=0.5", "algorithm.kl.coef=0.1")
    metrics = small_cast.run(config, fresh=["actor"]).iterate()
    assert metrics["actor/optimizer_steps"] == 4.0
    assert metrics["actor/reference_kl"] == pytest.approx(0.0, abs=1e-5)


def test_an_entropy_bonus_is_given_the_entropy_and_no_other_run_pays_for_it(small_cast: SmallCast):
    metrics = [small_cast.run(small_config(f"algorithm.entropy_coef={coef}")).iterate() for coef in (0.01, 0.0)]
    assert 0.0 < metrics[0]["actor/entropy"] < math.log(128)
    assert "actor/entropy" not in metrics[1]


def test_the_kl_in_the_reward_is_paid_at_the_coefficient_of_the_iteration(small_cast: SmallCast):
    """The first iteration has no distance to the reference, so both runs come to the same policy before the second."""
    returns, distances = [], []
    for coef in (0.01, 2.0):
        config = small_config(
            f"algorithm.kl.coef={coef}", "algorithm.gae_lambda=1.0", "actor.optimizer.lr=1e-2", "rollout.group_size=1",
            "data.prompts_per_iteration=32",
        )  # fmt: skip
        run = small_cast.run(config, fresh=["actor", "critic"])
        run.iterate()
        metrics = run.iterate()
        returns.append(metrics["critic/return"])
        distances.append(metrics["actor/reference_kl"])
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)
    assert distances[0] > 0.0
    assert returns[0] - returns[1] > 0.1 * (2.0 - 0.01) * distances[0]


def test_the_kl_in_the_loss_weighs_what_the_controller_says_it_does(small_cast: SmallCast):
    """The second iteration has a distance to the reference: far below the target, so the coefficient falls by 0.02."""
    adaptive = "algorithm.kl={coef: 0.5, place: loss, controller: adaptive, target: 6.0, horizon: 320}"
    options = ("algorithm.name=rloo", "algorithm.aggregation=token-mean", "algorithm.num_mini_batches=1")
    run = small_cast.run(small_config(adaptive, *options, "actor.optimizer.lr=1e-2"), fresh=["actor"])
    run.iterate()
    assert run.state.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 32 / 320))
    metrics = run.iterate()
    assert metrics["actor/kl_loss"] > 1e-4
    weight = (metrics["actor/loss"] - metrics["actor/policy_loss"]) / metrics["actor/kl_loss"]
    assert weight == pytest.approx(0.49, rel=1e-3)


def test_pass_at_k_learns_from_right_answers_that_weigh_little(small_cast: SmallCast):
    graders = "reward.graders=[{name: exact, kind: rule, function: exact_answer, weight: 0.5}]"
    options = ("algorithm.name=pass_at_k", "algorithm.pass_threshold=0.25", graders)
    run = small_cast.run(small_config(*options), fresh=["reward"])
    metrics = run.iterate()
    run.context.groups["reward"].call("close")
    assert 0.0 < metrics["reward/score_mean"] < 0.5
    assert metrics["advantage/magnitude"] > 0.0


def test_an_iteration_stops_at_its_target_kl_and_not_before(small_cast: SmallCast):
    steps = {}
    for target in (1e-12, 10.0):  # of four steps the first is taken in any case: nothing has moved before it
        run = small_cast.run(small_config(f"algorithm.target_kl={target}", "actor.optimizer.lr=1e-2"), fresh=["actor"])
        metrics = run.iterate()
        steps[target] = (metrics["actor/optimizer_steps"], metrics["actor/early_stops"] if target < 1 else 0.0)
    assert steps == {1e-12: (1.0, 1.0), 10.0: (4.0, 0.0)}


def test_rows_that_are_too_old_are_told_by_the_version_that_is_trained(small_cast: SmallCast):
    options = ("algorithm.name=rloo", "algorithm.kl.coef=0.0", "algorithm.correction.max_staleness=0")
    run = small_cast.run(small_config(*options), fresh=["rollout"])
    config = run.config
    at = run.state.stamp(config, 1)
    with use_host(run.context):
        batch = call_step(rollout, at, at.policy_version)
        done = [batch, *(call_step(one, at, batch) for one in (reward, actor_log_probs))]
        later = replace(at, policy_version=at.policy_version + 1)
        metrics = call_step(advantage, later, done).metrics
    assert (metrics["rollout/stale_rows"], metrics["rollout/staleness"]) == (32.0, 1.0)


def test_sources_have_groups_of_their_own_size(small_cast: SmallCast):
    sources = (
        "[{name: a, kind: sorting, size: 50, group_size: 2, options: {num_digits: 3}},"
        " {name: b, kind: sorting, size: 50, group_size: 6, options: {num_digits: 4}}]"
    )
    config = small_config("algorithm.name=rloo", f"data.sources={sources}")
    run = small_cast.run(config, fresh=["rollout"])
    metrics = run.iterate()
    assert metrics["rollout/rows"] == 4 * 2 + 4 * 6
    assert {"reward/source/a/score_mean", "reward/source/b/score_mean"} <= metrics.keys()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.name=dapo", "reward.normalise=true"], "scores while sampling"),
        (["algorithm.name=remax", "reward.normalise=true"], "scores while sampling"),
    ],
)
def test_a_scale_known_only_after_the_batch_is_refused(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        small_config(*overrides)


def test_a_single_step_without_the_extra_scoring_trains_as_one_with_it(small_cast: SmallCast):
    options = ("algorithm.name=grpo", "algorithm.num_mini_batches=1", "algorithm.num_ppo_epochs=1")
    metrics = {}
    for mode in ("recompute", "auto"):
        run = small_cast.run(small_config(*options, f"algorithm.old_log_probs={mode}"), fresh=["actor"])
        metrics[mode] = run.iterate()
        assert ("actor-log-probs" in run.facts) == (mode == "recompute")
    scored, unscored = metrics["recompute"], metrics["auto"]
    for name in ("actor/loss", "actor/grad_norm", "actor/reference_kl", "advantage/magnitude"):
        assert unscored[name] == pytest.approx(scored[name], rel=1e-5, abs=1e-7), name


def test_a_cut_response_is_worth_its_score_and_the_critics_value_behind_it(small_cast: SmallCast):
    """With gamma and lambda 1 every return of a row is that sum; without the setting it is the score alone."""
    cut = {"mode": "random", "min_length": 12, "max_length": 12}
    for is_on in (True, False):
        config = small_config(
            f"algorithm.bootstrap_truncated={str(is_on).lower()}", "algorithm.gae_lambda=1.0", "algorithm.kl.coef=0.0",
            script=cut,
        )  # fmt: skip
        run = small_cast.run(config, fresh=["rollout"])
        at = run.state.stamp(config, 1)
        with use_host(run.context):
            batch = call_step(rollout, at, at.policy_version)
            done = [batch, *(call_step(one, at, batch) for one in (reward, actor_log_probs, critic_values))]
            done.append(call_step(advantage, at, done))
            names = ("scores", "returns", "response_mask", *(("bootstrap_values",) if is_on else ()))
            rows = host().read(*(one.handle for one in done), columns=names).load()
        behind = rows["bootstrap_values"] if is_on else torch.zeros(32)
        assert bool((behind != 0.0).all()) == is_on
        wanted = (rows["scores"] + behind).repeat_interleave(8)
        torch.testing.assert_close(rows["returns"].values()[rows["response_mask"].values()], wanted, atol=1e-5, rtol=0)


def test_a_reference_that_is_refreshed_is_the_actor_of_that_moment(small_cast: SmallCast):
    config = small_config("algorithm.kl.coef=0.1", "algorithm.kl.refresh_every=2", "iterations=4")
    run = small_cast.run(config, fresh=["actor", "reference"])
    distances = [run.iterate()["actor/reference_kl"] for _ in range(4)]
    assert distances[0] == pytest.approx(0.0, abs=1e-6)
    assert distances[1] > 1e-6
    assert distances[2] == pytest.approx(0.0, abs=1e-6)
    assert distances[3] > 1e-6
