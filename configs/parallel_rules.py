"""Rules about how a model is cut over its ranks, and about adapters: what no worker could lay out is refused first."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from configs.layout import HYBRID_ROLES, active_roles, data_parallel_size, duties, placed
from configs.model import ModelConfig, ModelShape
from configs.problems import Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that vLLM's attention has on a CPU."""
_CUT_ALONG_TENSORS = ("actor", "critic", "reference", "rollout", "teacher")
_CUT_ALONG_SEQUENCES = ("actor", "critic", "reference")


def roles_can_be_cut(config: "RunConfig") -> Iterator[Problem]:
    """Peers of a role that is not cut would do the same work twice, or leave rows out."""
    for role in active_roles(config):
        where = config.roles[role]
        for key, able in (("tensor_parallel", _CUT_ALONG_TENSORS), ("sequence_parallel", _CUT_ALONG_SEQUENCES)):
            whole = [duty for duty in HYBRID_ROLES.get(role, (role,)) if duty not in able]
            if getattr(where, key) > 1 and whole:
                rule = f"{whole[0]} is not cut that way; {', '.join(able)} are"
                yield Problem(f"roles.{role}.{key}", getattr(where, key), rule, "set it to 1")
    role, size = duties(config)["rollout"], placed(config, "rollout").tensor_parallel
    if size > 1 and config.rollout.engine != "vllm":
        rule = f"rollout.engine is {config.rollout.engine!r}, which runs whole on each rank"
        yield Problem(f"roles.{role}.tensor_parallel", size, rule, "set it to 1, or use vllm")


def cuts_agree_with_the_rest(config: "RunConfig") -> Iterator[Problem]:
    """Tensor parallelism lies under FSDP2; adapters and lists of likeliest tokens are not cut."""
    here = [duty for duty in _CUT_ALONG_TENSORS if duty in duties(config) and duty != "rollout"]
    for duty in here:
        role, where = duties(config)[duty], placed(config, duty)
        section = "critic" if duty == "critic" else "actor"
        path, size = f"roles.{role}.tensor_parallel", where.tensor_parallel
        is_wrapped = data_parallel_size(config, duty) * where.sequence_parallel > 1 or config.model.dtype != "float32"
        if size > 1 and is_wrapped and not (config.critic if duty == "critic" else config.actor).fsdp:
            yield Problem(path, size, f"{section}.fsdp is false, and it lies under FSDP2", f"leave {section}.fsdp on")
        if size > 1 and duty == "actor" and config.model.lora is not None:
            yield Problem(path, size, "model.lora is set, and adapters are not cut", "use one of the two")
        peers = size * where.sequence_parallel
        is_top_k = config.distillation is not None and config.distillation.objective == "forward_kl_top_k"
        if peers > 1 and is_top_k and duty in ("actor", "teacher"):
            rule = "distillation.objective forward_kl_top_k compares tokens over a whole vocabulary and sequence"
            yield Problem(path, peers, rule, "set tensor_parallel and sequence_parallel of this role to 1")


def given_shapes_can_be_cut(config: "RunConfig") -> Iterator[Problem]:
    """`shape_problems` of the shapes that the config itself gives."""
    models: dict[str, ModelConfig | None] = {"model": config.model, "critic.model": config.critic.model}
    for index, grader in enumerate(config.reward.graders):
        models[f"reward.graders.{index}.judge.serve"] = grader.judge.serve if grader.judge is not None else None
    shapes = {path: model.shape for path, model in models.items() if model is not None and model.shape is not None}
    yield from shape_problems(config, shapes)


def shape_problems(config: "RunConfig", shapes: Mapping[str, ModelShape]) -> Iterator[Problem]:
    """Heads that the ranks do not divide, or that an engine has no attention for. `shapes` is by the models' paths."""
    for role in active_roles(config):
        for duty in HYBRID_ROLES.get(role, (role,)):
            path = "critic.model" if duty == "critic" and config.critic.model is not None else "model"
            if path in shapes and duty in _CUT_ALONG_TENSORS and duty != "teacher":
                yield from _undivided_heads(config, role, duty, shapes[path])
    for path, duty in _vllm_engines(config).items():
        if path in shapes and config.pools[placed(config, duty).pool].accelerator == "none":
            width = shapes[path].head_dim
            if width not in CPU_HEAD_SIZES:
                rule = f"each attention head of {path} is {width} wide, and vLLM on a CPU has {list(CPU_HEAD_SIZES)}"
                key = "rollout.engine" if path == "model" else path.replace("serve", "engine")
                yield Problem(key, "vllm", rule, "take a model with such heads, or engine huggingface")


def _undivided_heads(config: "RunConfig", role: str, duty: str, shape: ModelShape) -> Iterator[Problem]:
    where = placed(config, duty)
    kv_heads = shape.num_kv_heads or shape.num_heads
    # An engine gives every rank a copy of a key's head where there are fewer of them than ranks.
    heads = {"tensor_parallel": (shape.num_heads, *(() if duty == "rollout" else (kv_heads,)))}
    heads["sequence_parallel"] = (shape.num_heads,)
    peers = {"tensor_parallel": where.tensor_parallel}
    peers["sequence_parallel"] = where.sequence_parallel * where.tensor_parallel  # of the heads that a cut has left
    for key, counts in heads.items():
        size = peers[key] if getattr(where, key) > 1 else 1
        if any(count % size for count in counts):
            said = " and ".join(f"{count}" for count in dict.fromkeys(counts))
            rule = f"the model of the {duty} has {said} attention heads, which the ranks must divide"
            fitting = [n for n in range(1, min(counts) + 1) if not any(count % n for count in counts)]
            way_out = f"use one of {fitting}"
            if size != getattr(where, key):
                way_out = f"tensor_parallel times it is {size}; make that one of {fitting}"
            yield Problem(f"roles.{role}.{key}", getattr(where, key), rule, way_out)


def _vllm_engines(config: "RunConfig") -> dict[str, str]:
    """Path of a model that vLLM serves -> the duty in whose processes it does."""
    engines = {"model": "rollout"} if config.rollout.engine == "vllm" else {}
    for index, grader in enumerate(config.reward.graders):
        if grader.serves_judge and grader.judge is not None and grader.judge.engine == "vllm":
            engines[f"reward.graders.{index}.judge.serve"] = "reward"
    return engines


def adapters_act(config: "RunConfig") -> Iterator[Problem]:
    """Adapters are for what is trained; with dropout in them the first ratio of an update is not 1."""
    lora = config.model.lora
    if lora is not None and lora.dropout > 0.0 and config.recomputes_log_probs:
        rule = "log-probs are recomputed before the update, whose first ratio would then not be 1"
        yield Problem("model.lora.dropout", lora.dropout, rule, "set it to 0")
    frozen = {f"teachers.{index}.model": teacher.model for index, teacher in enumerate(config.teachers)}
    for index, grader in enumerate(config.reward.graders):
        served = grader.judge.serve if grader.judge is not None else None
        parts = {f"reward.graders.{index}.model": grader.model, f"reward.graders.{index}.judge.serve": served}
        frozen |= {path: model for path, model in parts.items() if model is not None}
    for path, model in frozen.items():
        if model.lora is not None:
            rule = "this model is only read, and new adapters change nothing"
            yield Problem(f"{path}.lora", "given", rule, "remove it; merge trained ones into the folder")


def attention_can_be_had(config: "RunConfig") -> Iterator[Problem]:
    """Flash attention is a kernel of accelerators, for half precision."""
    asked: dict[str, tuple[str, str]] = {}
    for duty in ("actor", "reference", "critic"):
        own = config.critic.model if duty == "critic" else None
        model, role = own or config.model, duties(config).get(duty)
        if model.attention == "flash_attention_2" and role in active_roles(config):
            path = "model" if own is None else "critic.model"
            asked[path] = (config.pools[placed(config, duty).pool].accelerator, model.dtype)
    for path, (accelerator, dtype) in asked.items():
        if accelerator == "none" or dtype == "float32":
            rule = f"it is for accelerators and bfloat16, and here are {accelerator} and {dtype}"
            yield Problem(f"{path}.attention", "flash_attention_2", rule, "use sdpa")


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    roles_can_be_cut,
    cuts_agree_with_the_rest,
    given_shapes_can_be_cut,
    adapters_act,
    attention_can_be_had,
)
