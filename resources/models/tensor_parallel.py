"""Tensor parallelism by the model's own plan: heads and feed-forward columns over ranks, the vocabulary as well.

`transformers` carries a plan with each architecture and cuts the weights into DTensors. Two things are different here:
tied embeddings stay tied (both names on one cut of the vocabulary), and the gradients of weights that every rank holds
but only part of which it sees (norms of single heads) are summed once per optimizer step, not once per backward.
"""

import re

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from resources.models.causal_lm import ModelError
from resources.models.sharding import local_part

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_EMBEDDING = "embedding_rowwise"


def cut_over_tensor_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> tuple[str, ...]:
    """Cut `model` in place over the ranks of `mesh`.

    Returns:
        names of parameters whose gradients must be summed over the ranks before a step (`sum_partial_gradients`).

    Raises:
        ModelError: for a model without a plan, or whose heads do not divide.
    """
    plan = dict(model.tp_plan)
    if not plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan; set tensor_parallel to 1 and shard with FSDP2"
        )
    _check_heads(model, mesh.size())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    if is_tied:
        plan[next(name for name, part in model.named_modules() if part is embedding)] = _EMBEDDING
    partial = [pattern for pattern, style in plan.items() if style == _PARTIAL_GRADIENT]
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _PARTIAL_GRADIENT})
    if head is not None and is_tied:
        head.weight = embedding.weight
    return tuple(name for name, _ in model.named_parameters() if _matches(name, partial))


def sum_partial_gradients(
    parameters: dict[str, nn.Parameter], names: tuple[str, ...], group: dist.ProcessGroup
) -> None:
    """Sum the gradients of `names` over the tensor-parallel ranks, in place."""
    for name in names:
        gradient: Tensor | None = parameters[name].grad
        if gradient is not None:
            dist.all_reduce(local_part(gradient), group=group)


def _matches(name: str, patterns: list[str]) -> bool:
    module = name.rsplit(".", 1)[0]
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module) for pattern in patterns)


def _check_heads(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = config.to_dict().get(key)
        if count is not None and count % size:
            raise ModelError(
                f"tensor_parallel is {size} and the model has {key} {count}; the ranks must divide the heads"
            )
