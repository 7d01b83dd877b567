"""Every preset loads, says what it promises, and carries over to every algorithm."""

from typing import get_args

import pytest

from configs.algorithm_defaults import AlgorithmName
from configs.load import PRESETS, load_config, preset_names

PROMISED = {
    "quickstart", "quickstart-grpo", "quickstart-tools", "quickstart-distillation", "smollm2-gsm",
    "gsm8k-qwen2.5-0.5b-1gpu", "gsm8k-qwen2.5-1.5b-8gpu-colocated", "gsm8k-qwen2.5-1.5b-8gpu-split-pools",
    "gsm8k-qwen2.5-1.5b-2x8gpu",
}  # fmt: skip


def test_the_promised_presets_are_there():
    assert set(preset_names()) >= PROMISED


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_under_its_own_name(name: str):
    assert load_config(name).name == name


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_begins_by_saying_what_it_does(name: str):
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("name", sorted(set(get_args(AlgorithmName)) - {"distillation", "ppo", "decoupled_ppo"}))
def test_the_group_quick_start_carries_over_to_every_algorithm(name: str):
    assert load_config("quickstart-grpo", [f"algorithm.name={name}"]).algorithm.resolved().name == name


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "reinforce_plus_plus", "remax"])
def test_the_quick_start_carries_over_to_algorithms_without_groups(name: str):
    assert load_config("quickstart", [f"algorithm.name={name}"]).algorithm.resolved().name == name


@pytest.mark.parametrize("name", preset_names())
def test_training_and_validation_rows_differ(name: str):
    config = load_config(name)
    train = {(source.kind, source.path, source.split, source.seed) for source in config.data.sources}
    held_out = {(source.kind, source.path, source.split, source.seed) for source in config.validation.sources}
    assert not train & held_out


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_lets_the_engine_compile_and_capture_graphs_on_gpus_and_on_them_alone(name: str):
    config = load_config(name)
    on_gpu = any(pool.accelerator == "gpu" for pool in config.pools.values())
    assert config.rollout.enforce_eager is not on_gpu
