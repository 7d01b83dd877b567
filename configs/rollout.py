"""Sampling: the engine, the sampling distribution, and agent episodes."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, RowCount, Seconds, Seed, Strings, TokenIds
from configs.pools import Bytes
from configs.problems import as_written
from configs.scripted import ScriptedConfig


class SamplingConfig(Config):
    """The distribution responses are drawn from; the trained log-probs are of exactly this one."""

    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Below 0.01 vLLM raises it without a word, and greedy responses have no log-prob to train on."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: TokenIds = ()
    """Besides the tokenizer's end-of-sequence id."""


class ToolsConfig(Config):
    """Multi-turn episodes with tools or an environment."""

    functions: Strings = ()
    """Import paths `module:function`; the schema comes from type hints and docstring."""
    notation: Literal["json", "inline"] = "json"
    """`json`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. `inline`: `[name(text)]`."""
    result_template: str = "{result}"
    """What is written around a result for a model without chat template."""
    max_turns: Count = 4
    """Turns of the policy; an episode that wants more is cut and counts as truncated."""
    max_tool_tokens: Count = 64
    """Of one result, which is cut beyond. All of them count towards `max_response_length`."""
    timeout_seconds: Seconds = 10.0
    """Of one tool call: then the policy reads that nothing came. Of one step of an environment: then its episode ends
    without a score."""
    environment: str | None = None
    """Import path of an environment with `reset` and `step`, or `reasoning_gym:NAME`."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the environment's constructor."""

    @model_validator(mode="after")
    def _results_are_shown(self) -> "ToolsConfig":
        if "{result}" not in self.result_template:
            raise ValueError(
                f"result_template is {self.result_template!r:.80}; without {{result}} in it the model never sees "
                "what a tool answers"
            )
        if self.environment_options and self.environment is None:
            raise ValueError(
                f"environment_options is {as_written(self.environment_options)}, and environment is not set; name it"
            )
        return self


class ServersConfig(Config):
    """Engine replicas that take single requests (continuous batching) in place of one batch call."""

    enabled: bool = False
    openai_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Loopback port of an OpenAI-compatible endpoint, on the node of the rollout pool's first bundle. With `agent` a
    free one when left out, and no endpoint without."""
    agent: str | None = None
    """Import path `module:function` of a program that plays an episode through any OpenAI client: called with
    `base_url`, `prompt`, `answer`, `source`, `index` and `extra` as far as it asks for them. A number it returns is the
    score that grader `environment_score` reads."""
    agent_processes: Count = 2
    """Processes of the agent that compute at a time; those that wait for the policy are more."""
    agent_seconds: Seconds = 300.0
    """Of one episode; one that takes longer is left out and counted."""
    request_deadline_seconds: Seconds = 120.0
    """Of one request; a row that has no answer by then takes its group out of the update, which is counted."""
    max_redispatches: Annotated[int, Field(ge=0)] = 2
    """Times a request is sent to another replica because one was lost or stuck."""
    updates_while_sampling: bool = False
    """With `async_depth`: new weights are loaded while rollouts ahead still sample; those pause, and go on from the
    tokens they have. Each token keeps the version and log-prob it was sampled with."""


class RolloutConfig(Config):
    """How responses are sampled."""

    engine: Literal["vllm", "huggingface", "scripted"] = "vllm"
    group_size: RowCount = 1
    """Responses sampled for each prompt."""
    max_response_length: Count = 256
    sampling: SamplingConfig = SamplingConfig()
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the engine's weights; the model's when left out."""
    max_running_sequences: Count = 256
    gpu_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the accelerator's memory the engine may take (GPU)."""
    offload: bool = False
    """Keep the engine's weights in host memory, and no KV cache, while nothing is sampled and no weights come (GPU)."""
    kv_cache_bytes: Bytes | None = None
    """KV cache of a CPU engine; 256 MiB when left out."""
    num_gpu_blocks_override: Count | None = None
    """KV-cache blocks, by number; for tests of preemption."""
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    """Compile nothing and capture no graphs. On GPUs `false` pays off within minutes; on CPUs it takes a tenth to a
    fifth off the time of sampling, for 40 s at the first start of a model and 10 s at later ones."""
    max_model_length: Count | None = None
    """Prompt + response; the sum of both limits when left out."""
    seed_offset: Seed = 0
    """Added to the run seed for sampling alone."""
    weight_sync: Literal["auto", "in_process", "object_store", "process_group"] = "auto"
    bucket_bytes: Bytes = 256 * 2**20
    """Weights stream in buckets of at most this size, which bounds the memory of a sync."""
    scripted: ScriptedConfig | None = None
    tools: ToolsConfig | None = None
    servers: ServersConfig = ServersConfig()
    stuck_response_seconds: Seconds | None = None
    """With servers: longest a response may take on one replica; then it goes to another. A response that none finished
    within `servers.request_deadline_seconds` drops its group, which is counted in `rollout/dropped_groups`."""

    @model_validator(mode="after")
    def _script_is_there(self) -> "RolloutConfig":
        if (self.engine == "scripted") != (self.scripted is not None):
            given = "missing" if self.scripted is None else "given"
            raise ValueError(
                f"engine is {self.engine!r} and scripted is {given}; the script goes with the scripted engine"
            )
        if self.stuck_response_seconds is not None and not self.servers.enabled:
            raise ValueError(
                f"stuck_response_seconds is {self.stuck_response_seconds:g} and servers.enabled is false; only servers"
                " send a response elsewhere. Enable them, or bound a batch call with recovery.call_deadline_seconds"
            )
        return self
