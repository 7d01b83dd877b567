"""Memory of each role on each accelerator, estimated from sizes alone. Pure: no torch. Formulas: docs/memory.md.

Weights, gradients and optimizer states are exact for a Llama-shaped model; activations and buffers are estimates.
What a process takes before it holds anything is `process_bytes`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from configs.layout import HYBRID_ROLES, data_parallel_size, num_workers, placed, process_groups, teacher_sizes
from configs.model import LoraConfig, ModelConfig, ModelShape
from configs.pools import RoleName
from configs.run import RunConfig
from configs.training import TrainedRoleConfig
from resources.ranks import Mesh

ONE_BY_ONE = Mesh()
"""Ranks that divide neither a model nor a sequence."""
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


def layer_numbers(shape: ModelShape, model: ModelConfig, longest: int) -> int:
    """Numbers that one layer keeps of one token for its backward: 8 hidden + 4 intermediate + 2 kv.

    Inputs and outputs of both norms, q, the attention's output, both residuals; gate, up, activation, product; k and v.
    Eager attention keeps the scores and their softmax too: 2 heads x longest.
    """
    numbers = 8 * shape.hidden_size + 4 * shape.intermediate_size + 2 * shape.kv_width
    return numbers + (2 * shape.num_heads * longest if model.attention == "eager" else 0)


def activation_bytes(shape: ModelShape, model: ModelConfig, tokens: int, longest: int) -> int:
    """What the forward of `tokens` tokens keeps for the backward, the final norm (2 hidden) included.

    With checkpointing each layer keeps its input alone, and one layer is whole at a time.
    """
    layer = layer_numbers(shape, model, longest)
    kept = shape.num_layers * layer
    if model.gradient_checkpointing:
        kept = shape.num_layers * shape.hidden_size + layer
    return tokens * (kept + 2 * shape.hidden_size) * DTYPE_BYTES[model.dtype]


def logit_bytes(shape: ModelShape, tokens: int, chunk_tokens: int, outputs: int | None = None) -> int:
    """float32 logits of one chunk; [tokens, vocabulary] is never held whole."""
    return min(tokens, chunk_tokens) * (outputs or shape.vocab_size) * 4 * LOGIT_COPIES


def held_parameters(shape: ModelShape, tensor_parallel: int, has_value_head: bool = False) -> int:
    """Parameters on one of the tensor-parallel ranks: matrices are cut; norms, and a head of one number, are not.

    The embedding is cut only where it is the output head's matrix as well.
    """
    vocabulary = shape.vocab_size * shape.hidden_size
    every = shape.num_parameters
    whole = (2 * shape.num_layers + 1) * shape.hidden_size
    if has_value_head:
        every += shape.hidden_size - (0 if shape.tied_embeddings else vocabulary)
        whole += shape.hidden_size
    if not shape.tied_embeddings:
        whole += vocabulary
    return -(-(every - whole) // tensor_parallel) + whole


def training_memory(
    model: ModelConfig,
    shape: ModelShape,
    role: TrainedRoleConfig,
    *,
    ranks: int,
    longest: int,
    mesh: Mesh = ONE_BY_ONE,
    has_value_head: bool = False,
) -> RoleMemory:
    """The actor or the critic on one of `ranks`, of which `mesh` says how they divide a model and a sequence.

    A frozen base under adapters is in float32 as trained weights are: `shard_module` keeps masters of all of them.
    """
    rows = max(1, ranks // mesh.tp)
    shards = rows if role.fsdp else 1
    base = held_parameters(shape, mesh.tp, has_value_head)
    adapters = 0 if model.lora is None else lora_parameters(shape, model.lora)
    trained = base if model.lora is None else adapters
    sequences = role.micro_batch_tokens or role.micro_batch_size * longest
    tokens = -(-sequences // mesh.sp)
    size = DTYPE_BYTES[model.dtype]
    layer = -(-shape.num_layer_parameters // mesh.tp)
    is_plain = rows == 1 and model.dtype == "float32"
    whole = 0 if is_plain else (base + adapters) * size  # cast once for all micro-batches
    return RoleMemory(
        weights=-(-(base + adapters) * MASTER_BYTES // shards),
        gradients=-(-trained * MASTER_BYTES // shards),
        optimizer=-(-trained * ADAM_BYTES // shards),
        activations=activation_bytes(shape, model, tokens, longest)
        + logit_bytes(shape, tokens, role.log_prob_chunk_tokens, 1 if has_value_head else None),
        communication=PREFETCHED_LAYERS * layer * size + layer * MASTER_BYTES if shards > 1 else whole,
    )


def forward_memory(
    model: ModelConfig,
    shape: ModelShape,
    role: TrainedRoleConfig,
    *,
    ranks: int,
    longest: int,
    mesh: Mesh = ONE_BY_ONE,
) -> RoleMemory:
    """A model that is only read: reference, teacher, reward model. One layer's activations exist at a time.

    On one rank it is held in the arithmetic's dtype; over several it lies as a trained one does, in float32.
    """
    size = DTYPE_BYTES[model.dtype]
    rows = max(1, ranks // mesh.tp)
    shards = rows if role.fsdp else 1
    held = held_parameters(shape, mesh.tp)
    is_plain = ranks == 1 or (rows == 1 and model.dtype == "float32")
    sequences = role.log_prob_micro_batch_size or role.micro_batch_size
    tokens = -(-(role.micro_batch_tokens or sequences * longest) // mesh.sp)
    logits = logit_bytes(shape, tokens, role.log_prob_chunk_tokens)
    gathered = PREFETCHED_LAYERS * -(-shape.num_layer_parameters // mesh.tp) * size
    return RoleMemory(
        weights=-(-held * (size if ranks == 1 else MASTER_BYTES) // shards),
        activations=tokens * layer_numbers(shape, model, longest) * size + logits,
        communication=gathered if shards > 1 else 0 if is_plain else held * size,
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
        activations=running * (layer_numbers(shape, config.model, longest) * DTYPE_BYTES[dtype] + shape.vocab_size * 4),
        communication=min(rollout.bucket_bytes, shape.num_parameters * DTYPE_BYTES[dtype]),
    )


def memory_of_duties(config: RunConfig, shapes: dict[str, ModelShape]) -> dict[str, RoleMemory]:
    """Duty -> memory of one of its ranks. `shapes` is by the paths of `models_of`: "model", "critic.model"."""
    table: dict[str, RoleMemory] = {}
    for group in process_groups(config):
        is_gpu = config.pools[group.pool].accelerator != "none"
        for duty in (duty for role in group.roles for duty in duties_of_role(role)):
            memory = _memory_of(config, duty, shapes, is_gpu)
            if memory is not None:
                table[duty] = memory
    return table


def _memory_of(config: RunConfig, duty: str, shapes: dict[str, ModelShape], is_gpu: bool) -> RoleMemory | None:
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    student = shapes["model"]
    if duty in ("actor", "critic", "reference"):
        role, ranks = placed(config, duty), num_workers(config, duty)
        mesh = Mesh(tp=role.tensor_parallel, sp=role.sequence_parallel)
        if duty == "actor":
            return training_memory(config.model, student, config.actor, ranks=ranks, mesh=mesh, longest=longest)
        if duty == "critic":
            model, shape = config.critic.model or config.model, shapes.get("critic.model", student)
            model = model if config.critic.model is not None else model.model_copy(update={"lora": None})
            return training_memory(
                model, shape, config.critic, ranks=ranks, mesh=mesh, longest=longest, has_value_head=True
            )
        if config.model.lora is not None or not config.algorithm.needs_reference:
            return None
        return forward_memory(config.model, student, config.actor, ranks=ranks, mesh=mesh, longest=longest)
    if duty == "rollout":
        rows = -(-config.rows_per_iteration // data_parallel_size(config, duty))
        return rollout_memory(config, student, is_gpu=is_gpu, rows=rows, longest=longest)
    # Each teacher has ranks of its own, and reward models share those of the role; the largest is shown.
    found = [
        forward_memory(model, shapes[path], config.actor, ranks=ranks, mesh=mesh, longest=longest)
        for path, model, ranks, mesh in _read_models(config, duty)
    ]
    return max(found, key=lambda memory: memory.total, default=None)


def _read_models(config: RunConfig, duty: str) -> Iterator[tuple[str, ModelConfig, int, Mesh]]:
    """Path, model, ranks and mesh of each teacher or each grader with a model; a judge's engine is whole on a rank."""
    models = models_of(config)
    if duty == "teacher":
        mesh = Mesh(tp=placed(config, duty).tensor_parallel)
        for index, ranks in enumerate(teacher_sizes(config, num_workers(config, duty))):
            yield f"teachers.{index}.model", models[f"teachers.{index}.model"], ranks, mesh
    elif duty == "reward":
        for path, model in models.items():
            if path.startswith("reward."):
                yield path, model, 1 if path.endswith(".serve") else num_workers(config, duty), ONE_BY_ONE


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
        if grader.judge is not None and grader.judge.serve is not None:
            models[f"reward.graders.{index}.judge.serve"] = grader.judge.serve
    return models


def gib(amount: int) -> str:
    """Bytes as a person reads them: "1.50 GiB", "12.3 MiB"."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"
