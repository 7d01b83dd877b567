"""A trained reward model as a folder that `transformers` and this project load again."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from resources.models.published_folder import published_folder

TRUNK, HEAD = "model.", "score."
"""How a `ScalarModel` calls its two parts."""


def export_reward_model(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, named: Mapping[str, Tensor]
) -> None:
    """Write whole tensors of a `ScalarModel` as a ...ForSequenceClassification with one label, and the tokenizer.

    Written aside and published by one rename; an older folder is replaced.
    """
    settings = copy.deepcopy(config)
    settings.num_labels = 1
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    whole = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    trunk = getattr(whole, whole.base_model_prefix)
    weights = {name: tensor.detach().cpu().float() for name, tensor in named.items()}
    trunk.load_state_dict({name.removeprefix(TRUNK): one for name, one in weights.items() if name.startswith(TRUNK)})
    whole.score.load_state_dict(
        {name.removeprefix(HEAD): one for name, one in weights.items() if name.startswith(HEAD)}
    )
    with published_folder(folder) as staging:
        whole.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
