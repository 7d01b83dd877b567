"""Every rollout field reaches the engine, or whatever else it is for; nothing is overwritten on the way."""

import pytest

from configs.rollout import RolloutConfig
from resources.engines.vllm_arguments import check_accelerator, check_arguments, engine_arguments

ENGINE = {
    "max_running_sequences": ("max_num_seqs", 5),
    "kv_cache_bytes": ("kv_cache_memory_bytes", 3 * 2**20),
    "num_gpu_blocks_override": ("num_gpu_blocks_override", 9),
    "enable_prefix_caching": ("enable_prefix_caching", False),
    "enforce_eager": ("enforce_eager", False),
    "gpu_memory_fraction": ("gpu_memory_utilization", 0.25),
}
"""Field -> vLLM's name for it, and a value that is not the default."""
GIVEN_BY_THE_WORKER = {"dtype", "max_model_length", "seed_offset", "max_response_length", "sampling", "group_size"}
NOT_THE_ENGINES = {
    "engine", "scripted", "weight_sync", "bucket_bytes", "tools", "servers", "stuck_response_seconds", "offload",
}  # fmt: skip


def arguments(rollout: RolloutConfig, *, is_cpu: bool = True, **changes) -> dict:
    given = {"dtype": "float32", "max_model_length": 64, "seed": 1, "tensor_parallel": 1, **changes}
    return engine_arguments(rollout, is_cpu=is_cpu, **given)


def test_every_rollout_field_has_a_place():
    assert set(RolloutConfig.model_fields) == {*ENGINE, *GIVEN_BY_THE_WORKER, *NOT_THE_ENGINES}


@pytest.mark.parametrize("field", ENGINE)
def test_a_value_that_is_not_the_default_is_passed_on(field):
    name, value = ENGINE[field]
    is_cpu = field != "gpu_memory_fraction"
    assert arguments(RolloutConfig(), is_cpu=is_cpu)[name] != value
    assert arguments(RolloutConfig(**{field: value}), is_cpu=is_cpu)[name] == value


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"max_model_length": 99}, "max_model_len", 99),
        ({"seed": 2**40 + 3}, "seed", 3),
        ({"tensor_parallel": 2}, "distributed_executor_backend", "external_launcher"),
    ],
)
def test_what_the_worker_gives_is_passed_on(change, name, expected):
    assert arguments(RolloutConfig(), **change)[name] == expected


def test_a_value_that_vllm_changed_is_refused():
    with pytest.raises(ValueError, match=r"'max_num_seqs': \(5, 8\)"):
        check_arguments({"max_num_seqs": 5, "seed": 1}, {"max_num_seqs": 8, "seed": 1})


def test_an_engine_built_for_accelerators_is_refused_where_none_is_seen():
    check_accelerator(is_needed=False, is_there=False)
    check_accelerator(is_needed=True, is_there=True)
    with pytest.raises(ValueError, match=r"this process sees none; name the accelerator of the engines' pool"):
        check_accelerator(is_needed=True, is_there=False)


def test_the_running_engines_say_what_they_were_asked_for(vllm_engine, cramped_engine):
    asked = {"max_num_seqs": 32, "enable_prefix_caching": True, "num_gpu_blocks_override": None, "seed": 5}
    assert {name: vllm_engine.arguments[name] for name in asked} == asked
    asked = {"max_num_seqs": 8, "enable_prefix_caching": False, "num_gpu_blocks_override": 7, "seed": 6}
    assert {name: cramped_engine.arguments[name] for name in asked} == asked
    common = {"logprobs_mode": "processed_logprobs", "dtype": "float32", "max_model_len": 64, "enforce_eager": True}
    assert {name: vllm_engine.arguments[name] for name in common} == common
