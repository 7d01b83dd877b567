"""Puts a whole model onto the ranks of its role: tensor parallel, then sequence parallel, then FSDP2 and the dtype."""

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.model import ModelConfig
from resources.models.policy import PolicyModel
from resources.models.sequence_parallel import SequenceRanks, use_ulysses
from resources.models.sharding import DTYPES, CommunicationClock, ParallelLayout, shard_module
from resources.models.tensor_parallel import cut_over_tensor_ranks
from resources.models.value_head import ScalarModel, SequenceScorer


def lay_out(
    module: nn.Module,
    model: ModelConfig,
    layout: ParallelLayout,
    *,
    is_trained: bool,
    fsdp: bool,
    device: torch.device,
    clock: CommunicationClock,
) -> tuple[str, ...]:
    """Lay `module` (a policy, a scalar model or a scorer) over the ranks, in place.

    A frozen model on one rank is simply held in the arithmetic's dtype; a trained one keeps float32 masters.
    Returns the names of parameters whose gradients are to be summed over the tensor-parallel ranks before a step.
    """
    if not is_trained and layout.world_size == 1:
        module.to(device)
        for parameter in module.parameters():  # and no buffer: rotary frequencies are float32, as in every other role
            parameter.data = parameter.data.to(DTYPES[model.dtype])
        return ()
    scorer, network, prefix = _parts(module)
    partial: tuple[str, ...] = ()
    if layout.mesh.tp > 1:
        if model.lora is not None:
            raise ValueError(
                "tensor_parallel is above 1 and model.lora is set; adapters are not cut, so use one of them"
            )
        assert layout.devices is not None
        partial = tuple(prefix + name for name in cut_over_tensor_ranks(network, layout.devices["tp"]))
    if layout.mesh.sp > 1:
        scorer.sequence = SequenceRanks(layout.group("sp"), clock)
        use_ulysses(network, scorer.sequence)
    shard_module(module, layout, dtype=model.dtype, fsdp=fsdp, device=device, clock=clock)
    return partial


def _parts(module: nn.Module) -> tuple[PolicyModel | ScalarModel, PreTrainedModel, str]:
    """What scores, the `transformers` model in it, and the prefix of that model's parameter names."""
    scorer = module.scalar if isinstance(module, SequenceScorer) else module
    if isinstance(scorer, PolicyModel):
        return scorer, scorer.lm, "lm."
    if isinstance(scorer, ScalarModel):
        return scorer, scorer.model, "model."
    raise TypeError(f"a {type(module).__name__} cannot be laid out; a PolicyModel, ScalarModel or SequenceScorer can")
