"""vLLM's arguments for a config, and the proof that they are in force. Imports no vllm: a test reads it in no time."""

from typing import Any

from configs.rollout import RolloutConfig

DEFAULT_CPU_KV_CACHE_BYTES = 256 * 2**20
CPU_BATCHED_TOKENS = 4096
"""Tokens of one step on a CPU, or one whole sequence when that is longer."""
SHORT_MODEL_LENGTH = 512
"""Up to here KV blocks on a CPU hold 32 tokens (vLLM's smallest) and not 128, so that short prompts share a prefix."""


def engine_arguments(
    rollout: RolloutConfig, *, dtype: str, max_model_length: int, seed: int, tensor_parallel: int, is_cpu: bool
) -> dict[str, Any]:
    """vLLM's arguments for a config: one place, every engine field of `rollout` in it."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_length,
        "max_num_seqs": rollout.max_running_sequences,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "num_gpu_blocks_override": rollout.num_gpu_blocks_override,
        "seed": seed % 2**31,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "external_launcher" if tensor_parallel > 1 else "uni",
        "enable_sleep_mode": not is_cpu,
    }
    if is_cpu:
        arguments["kv_cache_memory_bytes"] = rollout.kv_cache_bytes or DEFAULT_CPU_KV_CACHE_BYTES
        arguments["block_size"] = 32 if max_model_length <= SHORT_MODEL_LENGTH else 128
        # A seeded row whose prefill is cut in two fails on a CPU (vLLM rewinds a generator that has no offset there).
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, max_model_length)
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_fraction
    return arguments


def effective_arguments(config: Any) -> dict[str, Any]:
    """The same arguments as they stand in vLLM's own configuration after the start."""
    model, cache, scheduler, parallel = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
    )
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "enforce_eager": model.enforce_eager,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "seed": model.seed,
        "logprobs_mode": model.logprobs_mode,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "distributed_executor_backend": parallel.distributed_executor_backend,
        "enable_sleep_mode": model.enable_sleep_mode,
        "block_size": cache.block_size,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
    }


def check_arguments(asked: dict[str, Any], effective: dict[str, Any]) -> None:
    """Raise ValueError when vLLM runs with anything other than what the config says."""
    changed = {name: (value, effective[name]) for name, value in asked.items() if effective[name] != value}
    if changed:
        raise ValueError(
            f"vLLM did not take these arguments (asked, in effect): {changed}; the config would not say what runs"
        )


def check_accelerator(*, is_needed: bool, is_there: bool) -> None:
    """Raise ValueError where a vLLM that was built for accelerators is in a process that sees none."""
    if is_needed and not is_there:
        raise ValueError(
            "this vLLM is built for accelerators and this process sees none; name the accelerator of the engines' pool "
            "(pools.*.accelerator, for example gpu), install vLLM's CPU build, or use rollout.engine huggingface"
        )
