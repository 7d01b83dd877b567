"""Advantages and losses of the user's own: found at the start, called with what they ask for, and looked at."""

import pickle
from functools import partial

import pytest
import torch
from torch import tensor

from configs.load import load_config
from tasks.hooks import checked_advantages, checked_loss, own_function
from tasks.objectives_of import actor_columns, actor_loss, advantage_columns, advantage_function
from tests.tasks import hooks_here
from tests.tasks.local_cast import small_config
from tests.tasks.local_run import LocalRun, cast_here

HERE = "tests.tasks.hooks_here"
MASK = tensor([[False, True, True], [False, True, False]])
COLUMNS = {"response_mask": MASK, "scores": tensor([1.0, torch.nan])}
"""A row with two sampled tokens and a score of 1, and an unscorable row."""


def advantages(name: str, **settings):
    return checked_advantages(COLUMNS, function=getattr(hooks_here, name), path=f"{HERE}:{name}", **settings)


def loss(name: str, log_probs: torch.Tensor):
    td = {"response_mask": MASK}
    return checked_loss(log_probs, None, td, function=getattr(hooks_here, name), path=f"{HERE}:{name}")


def test_an_advantage_needs_to_give_nothing_but_advantages_and_unscorable_rows_stay_out():
    new, metrics = checked_advantages(COLUMNS, function=partial(hooks_here.scaled, gamma=0.5), path="p")
    assert new["train_mask"].tolist() == [[False, True, True], [False, False, False]]
    assert new["advantages"].tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert metrics == {"advantage/own": tensor(7.0)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("narrow", r"gave 'advantages' as \(2,\); it is a tensor \(2, 3\)"),
        ("broken", r"gave nan at row 0, token 1 \(2 tokens in all\)"),
        ("alone", r"returned a Tensor; it returns \(new columns, metrics\)"),
    ],
)
def test_an_advantage_of_the_wrong_form_is_told_with_its_path(name: str, said: str):
    with pytest.raises(ValueError, match=f"algorithm.advantage '{HERE}:{name}' {said}"):
        advantages(name)


def test_an_advantage_without_the_returns_that_a_critic_learns_from_is_refused():
    with pytest.raises(ValueError, match="gave no 'returns', which this run needs"):
        advantages("broken", needed=("returns",))


def test_the_correction_of_the_run_is_made_for_an_advantage_that_makes_none():
    columns = COLUMNS | {"old_log_probs": torch.zeros(2, 3), "rollout_log_probs": torch.full((2, 3), -3.0)}
    new, metrics = checked_advantages(
        columns, function=partial(hooks_here.scaled, gamma=1.0), path="p", correction="token-truncate",
        correction_upper=2.0,
    )  # fmt: skip
    assert new["correction_weights"].tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert metrics["rollout/log_prob_gap"] == 6.0


@pytest.mark.parametrize(
    ("name", "said"),
    [("by_row", r"returned a loss \(2,\)"), ("flat", "returned a loss without a gradient; make it of log_probs")],
)
def test_a_loss_of_the_wrong_form_is_told_with_its_path(name: str, said: str):
    with pytest.raises(ValueError, match=f"algorithm.loss '{HERE}:{name}' {said}"):
        loss(name, torch.zeros(2, 3, requires_grad=True))


def test_a_loss_over_no_trained_token_needs_no_gradient():
    td = {"response_mask": torch.zeros(2, 3, dtype=torch.bool)}
    value, _ = checked_loss(torch.zeros(2, 3), None, td, function=hooks_here.flat, path="p")
    assert value == 0.0


def test_a_hook_gets_the_settings_that_it_names_and_no_others():
    assert own_function(f"{HERE}:scaled", "k", ("columns",), {"gamma": 0.9, "seed": 1}).keywords == {"gamma": 0.9}
    assert own_function(f"{HERE}:narrow", "k", ("columns",), {"gamma": 0.9}).keywords == {"gamma": 0.9}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("math:nothing", "'math' has no function or class 'nothing'"),
        ("no_such_module:f", "'no_such_module' does not import"),
        (f"{HERE}:demanding", "missing a required argument: 'temperature_of_mine'; beyond them it may ask for"),
        (f"{HERE}:pull", r"cannot be called with \(columns\)"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_by_its_key(path: str, said: str):
    config = load_config("quickstart-grpo", [f"algorithm.advantage='{path}'"])
    with pytest.raises(ValueError, match=f"algorithm.advantage is '{path}'.*{said}"):
        advantage_function(config, 0.0, 1)


def test_hooks_travel_and_read_what_the_engine_and_the_actor_know_of_each_token():
    config = load_config("quickstart-grpo", [f"algorithm.loss='{HERE}:pull'", f"algorithm.advantage='{HERE}:surest'"])
    for function in (actor_loss(config, 0.0), advantage_function(config, 0.0, 1)):
        assert pickle.loads(pickle.dumps(function)).keywords["path"] == function.keywords["path"]
    assert {"entropy", "rollout_log_probs", "old_log_probs"} <= set(actor_columns(config))
    assert {"entropy", "rollout_log_probs", "old_log_probs"} <= set(advantage_columns(config))


def test_an_iteration_runs_on_an_advantage_and_a_loss_of_the_users_own():
    config = small_config(
        "algorithm.name=grpo", "algorithm.aggregation=token-mean", f"algorithm.advantage='{HERE}:surest'",
        f"algorithm.loss='{HERE}:pull'",
    )  # fmt: skip
    groups = cast_here(config)
    try:
        run = LocalRun(config, groups)
        run.sync()
        metrics = run.iterate()
    finally:
        groups["reward"].call("close")
    assert metrics["actor/own"] == 4.0  # 1 for each micro-batch: two epochs of two mini-batches
    assert metrics["advantage/lowest_entropy"] >= 0.0
    assert metrics["actor/optimizer_steps"] == 4.0
