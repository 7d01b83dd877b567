"""From the configuration to what workers run: every algorithm builds, and a hook that is not there is named."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from configs.algorithm_defaults import DEFAULTS, READERS
from configs.load import load_config
from configs.run import RunConfig
from tasks.algorithms.objectives import policy_loss_knobs
from tasks.objectives_of import actor_columns, actor_loss, advantage_columns, advantage_function, critic_loss

CRITIC_FREE = sorted(set(DEFAULTS) - {"ppo", "decoupled_ppo", "distillation"})


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_every_algorithm_becomes_functions_that_travel(name: str):
    config = load_config("quickstart-grpo", [f"algorithm.name={name}"])
    for function in (actor_loss(config, 0.0), critic_loss(config), advantage_function(config, 0.0, 1)):
        assert pickle.loads(pickle.dumps(function)).func is function.func


def test_ppo_reads_values_and_grpo_does_not():
    assert "values" in advantage_columns(load_config("quickstart"))
    assert "values" not in advantage_columns(load_config("quickstart-grpo"))


def test_the_actor_reads_reference_log_probs_only_for_a_kl_in_the_loss():
    in_reward = load_config("quickstart", ["algorithm.kl.coef=0.1", "algorithm.kl.place=reward"])
    in_loss = load_config("quickstart", ["algorithm.kl.coef=0.1", "algorithm.kl.place=loss"])
    assert "ref_log_probs" not in actor_columns(in_reward)
    assert "ref_log_probs" in actor_columns(in_loss)


def loss_of(config: RunConfig) -> partial:
    return actor_loss(config, 0.0)


def advantage_of(config: RunConfig) -> partial:
    return advantage_function(config, 0.0, 1)


@pytest.mark.parametrize(
    ("setting", "build", "keyword"),
    [
        ("algorithm.clip_ratio_low=0.11", loss_of, "clip_ratio_low"),
        ("algorithm.clip_ratio_high=0.12", loss_of, "clip_ratio_high"),
        ("algorithm.clip_ratio_dual=3.0", loss_of, "clip_ratio_dual"),
        ("algorithm.entropy_coef=0.13", loss_of, "entropy_coef"),
        ("algorithm.aggregation=token-sum", loss_of, "aggregation"),
        ("algorithm.kl.estimator=k2", loss_of, "kl_estimator"),
        ("rollout.max_response_length=7", loss_of, "max_response_length"),
        ("algorithm.value_clip=0.14", critic_loss, "value_clip"),
        ("algorithm.gamma=0.9", advantage_of, "gamma"),
        ("algorithm.gae_lambda=0.8", advantage_of, "gae_lambda"),
        ("algorithm.whiten_advantages=false", advantage_of, "whiten_advantages"),
        ("algorithm.scale_by_std=true", advantage_of, "scale_by_std"),
        ("algorithm.pass_k=5", advantage_of, "pass_k"),
        ("algorithm.pass_threshold=0.25", advantage_of, "pass_threshold"),
        ("algorithm.bootstrap_truncated=true", advantage_of, "bootstrap_truncated"),
        ("algorithm.correction.mode=icepop", advantage_of, "correction"),
        ("algorithm.correction.lower=0.5", advantage_of, "correction_lower"),
        ("algorithm.correction.upper=1.5", advantage_of, "correction_upper"),
    ],
)
def test_a_setting_reaches_the_function_that_reads_it(setting: str, build: Callable[..., partial], keyword: str):
    value = yaml.safe_load(setting.partition("=")[2])
    plain, changed = (build(load_config("quickstart", given)).keywords[keyword] for given in ((), (setting,)))
    assert changed == value != plain


@pytest.mark.parametrize(("place", "is_paid"), [("reward", True), ("loss", False)])
def test_the_kl_has_one_place(place: str, is_paid: bool):
    config = load_config("quickstart", ["algorithm.kl.coef=0.3", f"algorithm.kl.place={place}"])
    reward, loss = advantage_function(config, 0.2, 1).keywords, actor_loss(config, 0.2).keywords
    assert (reward["kl_in_reward"], reward["kl_coef"]) == (is_paid, 0.2)  # the controller's, of this iteration
    assert loss["kl_coef"] == (0.0 if is_paid else 0.2)


@pytest.mark.parametrize(
    ("name", "setting", "keyword", "value"),
    [
        ("kl_cov", "covariance_kl_coef=0.7", "covariance_kl_coef", 0.7),
        ("sapo", "soft_temperature_positive=0.8", "temperature_positive", 0.8),
        ("sapo", "soft_temperature_negative=0.9", "temperature_negative", 0.9),
    ],
)
def test_a_setting_of_one_loss_alone_reaches_it(name: str, setting: str, keyword: str, value: float):
    config = load_config("quickstart-grpo", [f"algorithm.name={name}", f"algorithm.{setting}"])
    assert loss_of(config).keywords[keyword] == value


ONE_STEP = ("algorithm.num_mini_batches=1", "algorithm.num_ppo_epochs=1")


@pytest.mark.parametrize(
    ("overrides", "is_needed"),
    [
        ((), False),
        (("algorithm.num_mini_batches=2",), True),
        (("algorithm.num_ppo_epochs=2",), True),
        (("algorithm.old_log_probs=recompute",), True),
        (("algorithm.kl.place=reward",), True),
        (("algorithm.kl.place=reward", "algorithm.kl.coef=0"), False),
        (("algorithm.correction.mode=token-truncate",), True),
        (("algorithm.name=kl_cov",), True),
    ],
)
def test_old_log_probs_are_left_out_only_where_one_step_makes_them_itself(overrides: tuple[str, ...], is_needed: bool):
    config = load_config("quickstart-grpo", [*ONE_STEP, *overrides])
    assert config.recomputes_log_probs == is_needed
    assert ("old_log_probs" in actor_columns(config)) == is_needed
    assert ("old_log_probs" in advantage_columns(config)) == is_needed
    assert ("rollout_log_probs" in advantage_columns(config)) == is_needed


def vetted_rows() -> dict[str, list[str]]:
    """Name -> cells of the table of vetted settings on the page of algorithms."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    section = page.partition("### Vetted settings and knobs")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines()]
    return {cells[0].strip("`"): cells[1:] for cells in rows if cells[0].startswith("`")}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_page_of_algorithms_has_the_vetted_settings_and_the_knobs_that_are_read(name: str):
    clip, kl, knobs = vetted_rows()[name]
    vetted, read = DEFAULTS[name], policy_loss_knobs(name)
    low = "none" if vetted.clip_ratio_low >= 1 else f"{vetted.clip_ratio_low:g}"
    assert clip == (f"{low}, {vetted.clip_ratio_high:g}" if "clip_ratio_low" in read else "-")
    assert kl == f"{vetted.kl_place}, {vetted.kl_estimator}"
    named = vetted_rows()["ppo" if "as `ppo`" in knobs else "grpo"][2] + knobs if "as `" in knobs else knobs
    for knob in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_dual", "covariance_kl_coef"):
        assert (f"`{knob}`" in named) == (knob in read) == (name in READERS[knob]), knob
    for knob in set(READERS) - {"clip_ratio_low", "clip_ratio_high", "clip_ratio_dual", "gamma"}:
        assert (f"`{knob}`" in named) == (name in READERS[knob]), knob
