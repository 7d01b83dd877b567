"""Memory of each role on each accelerator, estimated from sizes alone. Pure: no torch. Formulas: docs/memory.md.

Weights, gradients and optimizer states are exact for a Llama-shaped model; activations and buffers are estimates.
What a process takes before it holds anything is `process_bytes`.
"""

from dataclasses import dataclass, fields

from configs.layout import HYBRID_ROLES, data_parallel_size, placed, process_groups
from configs.model import LoraConfig, ModelConfig, ModelShape
from configs.pools import RoleName
from configs.run import RunConfig
from configs.training import TrainedRoleConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 4
"""Training keeps float32 weights and gradients, whatever the arithmetic."""
ADAM_BYTES = 8
"""Two float32 moments a parameter."""
LOGIT_COPIES = 3
"""float32 logits, their softmax and their gradient exist at once in a chunk."""
PREFETCHED_LAYERS = 2
"""FSDP gathers the layer in use and the next one."""
DEFAULT_CPU_KV_CACHE = 256 * 2**20
GPU_CONTEXT_BYTES = 1 * 2**30
"""CUDA context, NCCL and library workspaces of one process: a guess, between 0.5 and 1.5 GiB are usual."""
CPU_PROCESS_BYTES = 300 * 2**20
"""A worker process that has imported torch and tensordict: 265 MB of its own were measured."""
CPU_ENGINE_BYTES = 1400 * 2**20
"""What vLLM adds to a worker process on a CPU beside weights and cache: 1.7 GB were measured for the whole."""
ACCELERATOR_GIB = {
    "T4": 16, "V100": 16, "L4": 24, "A10G": 24, "A100-40G": 40, "L40S": 48, "A100-80G": 80, "H100": 80, "H200": 141,
    "B200": 180,
}  # fmt: skip
"""Memory by Ray's accelerator type; A100 alone is left out, since it is sold with 40 and with 80."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Bytes that one role takes on one accelerator (or in one CPU process)."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """All of it at once."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def certain(self) -> int:
        """What does not depend on an estimate: weights, gradients, optimizer states."""
        return self.weights + self.gradients + self.optimizer


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Parameters of the adapters: rank x (inputs + outputs) of each adapted matrix, in every layer."""
    query = shape.num_heads * shape.head_dim
    sides = {
        "q_proj": (shape.hidden_size, query),
        "k_proj": (shape.hidden_size, shape.kv_width),
        "v_proj": (shape.hidden_size, shape.kv_width),
        "o_proj": (query, shape.hidden_size),
        "gate_proj": (shape.hidden_size, shape.intermediate_size),
        "up_proj": (shape.hidden_size, shape.intermediate_size),
        "down_proj": (shape.intermediate_size, shape.hidden_size),
    }
    return shape.num_layers * sum(lora.rank * sum(sides[name]) for name in lora.target_modules if name in sides)


def activation_bytes(shape: ModelShape, model: ModelConfig, tokens: int, longest: int) -> int:
    """What the forward of `tokens` tokens keeps for the backward.

    A layer keeps 6 hidden + 4 intermediate + 2 kv numbers a token (norm inputs and outputs, q, attention output, both
    residuals; gate, up, activation, product; k and v); eager attention keeps heads x longest more. With checkpointing
    each layer keeps its input alone, and one layer is whole at a time.
    """
    per_token = 6 * shape.hidden_size + 4 * shape.intermediate_size + 2 * shape.kv_width
    if model.attention == "eager":
        per_token += 2 * shape.num_heads * longest
    kept = shape.num_layers * per_token
    if model.gradient_checkpointing:
        kept = shape.num_layers * shape.hidden_size + per_token
    return tokens * kept * DTYPE_BYTES[model.dtype]


def logit_bytes(shape: ModelShape, tokens: int, chunk_tokens: int, outputs: int | None = None) -> int:
    """float32 logits of one chunk; [tokens, vocabulary] is never held whole."""
    return min(tokens, chunk_tokens) * (outputs or shape.vocab_size) * 4 * LOGIT_COPIES


def training_memory(
    model: ModelConfig,
    shape: ModelShape,
    role: TrainedRoleConfig,
    *,
    ranks: int,
    longest: int,
    has_value_head: bool = False,
) -> RoleMemory:
    """The actor or the critic on one of `ranks` data-parallel ranks."""
    shards = ranks if role.fsdp else 1
    size = DTYPE_BYTES[model.dtype]
    parameters = shape.num_parameters + (shape.hidden_size if has_value_head else 0)
    if has_value_head and not shape.tied_embeddings:
        parameters -= shape.vocab_size * shape.hidden_size
    trained = lora_parameters(shape, model.lora) if model.lora is not None else parameters
    base = 0 if model.lora is None else parameters * size
    tokens = role.micro_batch_tokens or role.micro_batch_size * longest
    gathered = PREFETCHED_LAYERS * shape.num_layer_parameters * size + shape.num_layer_parameters * MASTER_BYTES
    return RoleMemory(
        weights=-(-(base + trained * MASTER_BYTES) // shards),
        gradients=-(-trained * MASTER_BYTES // shards),
        optimizer=-(-trained * ADAM_BYTES // shards),
        activations=activation_bytes(shape, model, tokens, longest)
        + logit_bytes(shape, tokens, role.log_prob_chunk_tokens, 1 if has_value_head else None),
        communication=gathered if shards > 1 else 0,
    )


def forward_memory(
    model: ModelConfig, shape: ModelShape, role: TrainedRoleConfig, *, shards: int, longest: int
) -> RoleMemory:
    """A model that is only read: reference, teacher, reward model. One layer's activations exist at a time."""
    size = DTYPE_BYTES[model.dtype]
    sequences = role.log_prob_micro_batch_size or role.micro_batch_size
    tokens = role.micro_batch_tokens or sequences * longest
    per_token = 6 * shape.hidden_size + 4 * shape.intermediate_size + 2 * shape.kv_width
    return RoleMemory(
        weights=-(-shape.num_parameters * size // shards),
        activations=tokens * per_token * size + logit_bytes(shape, tokens, role.log_prob_chunk_tokens),
        communication=PREFETCHED_LAYERS * shape.num_layer_parameters * size if shards > 1 else 0,
    )


def kv_bytes_per_token(shape: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Keys and values of one token in all layers, on one tensor-parallel rank."""
    return -(-2 * shape.num_layers * shape.kv_width * DTYPE_BYTES[dtype] // tensor_parallel)


def rollout_memory(config: RunConfig, shape: ModelShape, *, is_gpu: bool, rows: int, longest: int) -> RoleMemory:
    """One engine rank: its weights, a KV cache for the sequences that run at once, and a bucket of a weight sync."""
    rollout = config.rollout
    dtype = rollout.dtype or config.model.dtype
    tensor_parallel = placed(config, "rollout").tensor_parallel
    running = min(rollout.max_running_sequences, rows)
    wanted = running * longest * kv_bytes_per_token(shape, dtype, tensor_parallel)
    cache = wanted if is_gpu else (rollout.kv_cache_bytes or DEFAULT_CPU_KV_CACHE)
    weights = -(-shape.num_parameters * DTYPE_BYTES[dtype] // tensor_parallel)
    if rollout.engine == "scripted":
        return RoleMemory()
    return RoleMemory(
        weights=weights,
        kv_cache=cache,
        activations=running * (6 * shape.hidden_size + 4 * shape.intermediate_size) * DTYPE_BYTES[dtype]
        + running * shape.vocab_size * 4,
        communication=min(rollout.bucket_bytes, shape.num_parameters * DTYPE_BYTES[dtype]),
    )


def memory_of_duties(config: RunConfig, shapes: dict[str, ModelShape]) -> dict[str, RoleMemory]:
    """Duty -> memory of one of its ranks. `shapes` is by the paths of `models_of`: "model", "critic.model"."""
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    student = shapes["model"]
    table: dict[str, RoleMemory] = {}
    for group in process_groups(config):
        pool = config.pools[group.pool]
        for duty in (duty for role in group.roles for duty in duties_of_role(role)):
            ranks = data_parallel_size(config, duty) if duty != "advantage" else 1
            if duty == "actor":
                table[duty] = training_memory(config.model, student, config.actor, ranks=ranks, longest=longest)
            elif duty == "critic":
                model = config.critic.model or config.model
                shape = shapes.get("critic.model", student)
                table[duty] = training_memory(
                    model, shape, config.critic, ranks=ranks, longest=longest, has_value_head=True
                )
            elif duty == "reference" and config.model.lora is None and config.algorithm.needs_reference:
                table[duty] = forward_memory(config.model, student, config.actor, shards=ranks, longest=longest)
            elif duty == "rollout":
                rows = -(-config.rows_per_iteration // ranks)
                is_gpu = pool.accelerator != "none"
                table[duty] = rollout_memory(config, student, is_gpu=is_gpu, rows=rows, longest=longest)
            elif duty in ("teacher", "reward"):
                for name in [
                    name for name in shapes if name.startswith({"teacher": "teachers.", "reward": "reward."}[duty])
                ]:
                    model = model_at(config, name)
                    memory = forward_memory(model, shapes[name], config.actor, shards=1, longest=longest)
                    if duty not in table or memory.total > table[duty].total:
                        table[duty] = memory  # Each model has ranks of its own; the largest is shown.
    return table


def process_bytes(config: RunConfig, duties: tuple[str, ...], is_gpu: bool) -> int:
    """What one process takes before it holds a model: the CUDA context, or imported libraries on a CPU."""
    if is_gpu:
        return GPU_CONTEXT_BYTES
    has_engine = "rollout" in duties and config.rollout.engine == "vllm"
    return CPU_PROCESS_BYTES + (CPU_ENGINE_BYTES if has_engine else 0)


def duties_of_role(role: RoleName) -> tuple[RoleName, ...]:
    """The duties of a role, hybrids unfolded."""
    return HYBRID_ROLES.get(role, (role,))


def models_of(config: RunConfig) -> dict[str, ModelConfig]:
    """Every model of the config by its path: "model", "critic.model", "teachers.0.model", "reward.graders.1.model"."""
    models = {"model": config.model}
    if config.critic.model is not None and config.algorithm.needs_critic:
        models["critic.model"] = config.critic.model
    for index, teacher in enumerate(config.teachers):
        models[f"teachers.{index}.model"] = teacher.model
    for index, grader in enumerate(config.reward.graders):
        if grader.model is not None:
            models[f"reward.graders.{index}.model"] = grader.model
    return models


def model_at(config: RunConfig, path: str) -> ModelConfig:
    """The model that stands at `path` of `models_of`."""
    return models_of(config)[path]
