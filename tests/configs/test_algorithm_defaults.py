"""Naming an algorithm gives its paper's numbers; a user's own value wins."""

import dataclasses
from typing import get_args

import pytest

from configs.algorithm import AlgorithmConfig, KlConfig
from configs.algorithm_defaults import DEFAULTS, AlgorithmName

NAMES = get_args(AlgorithmName)


def test_every_name_has_vetted_settings():
    assert set(DEFAULTS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stays_undecided(name: AlgorithmName):
    resolved = dataclasses.asdict(AlgorithmConfig(name=name).resolved())
    assert [key for key, value in resolved.items() if value is None] == ["clip_ratio_dual"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", (0.2, 0.2, "token-mean", True, False, "reward", "k1")),
        ("grpo", (0.2, 0.2, "seq-mean-token-mean", False, True, "loss", "k3")),
        ("dr_grpo", (0.2, 0.2, "seq-mean-token-sum-norm", False, False, "loss", "k3")),
        ("dapo", (0.2, 0.28, "token-mean", False, True, "loss", "k3")),
        ("gspo", (3e-4, 4e-4, "seq-mean-token-mean", False, True, "loss", "k3")),
        ("gmpo", (0.4, 0.4, "seq-mean-token-mean", False, True, "loss", "k3")),
        ("reinforce_plus_plus", (0.2, 0.2, "token-mean", True, False, "reward", "k1")),
        ("reinforce_plus_plus_baseline", (0.2, 0.2, "token-mean", True, False, "loss", "k2")),
    ],
)
def test_the_vetted_numbers_are_the_papers(name: AlgorithmName, expected: tuple[object, ...]):
    r = AlgorithmConfig(name=name).resolved()
    assert expected == (
        r.clip_ratio_low, r.clip_ratio_high, r.aggregation, r.whiten_advantages, r.scale_by_std, r.kl_place,
        r.kl_estimator,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("ppo", KlConfig(place="loss"), "k3"),
        ("rloo", KlConfig(place="loss"), "k3"),
        ("ppo", KlConfig(place="loss", estimator="k1-straight-through"), "k1-straight-through"),
        ("grpo", KlConfig(place="reward"), "k1"),
        ("grpo", KlConfig(place="reward", estimator="k3"), "k3"),
        ("reinforce_plus_plus_baseline", KlConfig(place="loss"), "k2"),
    ],
)
def test_a_kl_in_another_place_than_the_papers_has_the_estimator_of_that_place(
    name: AlgorithmName, own: KlConfig, expected: str
):
    assert AlgorithmConfig(name=name, kl=own).resolved().kl_estimator == expected


def test_only_dapo_samples_again_by_itself():
    assert [name for name in NAMES if AlgorithmConfig(name=name).resolved().dynamic_sampling] == ["dapo"]


def test_an_own_value_wins_even_when_it_is_false_or_small():
    own = AlgorithmConfig(name="grpo", scale_by_std=False, clip_ratio_high=1e-9, kl=KlConfig(place="reward")).resolved()
    assert (own.scale_by_std, own.clip_ratio_high, own.kl_place, own.clip_ratio_low) == (False, 1e-9, "reward", 0.2)


def test_only_the_ppo_family_has_a_critic():
    assert [name for name in NAMES if AlgorithmConfig(name=name).needs_critic] == ["ppo", "decoupled_ppo"]


def test_a_reference_is_needed_only_for_a_kl():
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl=KlConfig(coef=0.1)).needs_reference
