"""The policy as a Hugging Face folder that `transformers`, vLLM and this project load again."""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from resources.models.generation_config import save_generation_config
from resources.models.published_folder import published_folder


def export_folder(
    folder: Path,
    config: PretrainedConfig,
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    named: Iterable[tuple[str, Tensor]],
) -> None:
    """Write whole tensors, configs and tokenizer aside, then publish by one rename; an older folder is replaced.

    Raises ValueError naming a tensor that the architecture lacks, or one that is missing.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    weights = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in named}
    expected = set(skeleton.state_dict())
    if set(weights) - expected or expected - set(weights):
        raise ValueError(
            f"the tensors do not fit {type(skeleton).__name__}: unknown {sorted(set(weights) - expected)[:5]}, "
            f"missing {sorted(expected - set(weights))[:5]}"
        )
    with published_folder(folder) as staging:
        skeleton.save_pretrained(staging, state_dict=weights)
        save_generation_config(generation, staging)
        tokenizer.save_pretrained(staging)
