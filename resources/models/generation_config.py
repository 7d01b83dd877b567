"""What is read of a model's generation config, and how it is written: as it came, its sampling defaults aside."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig


def end_token_ids(path: str, config: PretrainedConfig, tokenizer: Any) -> set[int]:
    """The tokenizer's end of sequence, and every one that the model at `path`, a folder or a hub name, tells of.

    As in transformers: those of its generation config, and where it has none, those of `config`, its own. That one was
    read from the same place before, so a generation config that is not found is not there.
    """
    try:
        named: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        named = config.get_text_config().eos_token_id
    more = named if isinstance(named, list) else [] if named is None else [named]
    return {int(tokenizer.eos_token_id), *(int(token) for token in more)}


def save_generation_config(generation: GenerationConfig, folder: Path) -> None:
    """As it came in: a model may end on tokens that its config and tokenizer do not name.

    Its own `save_pretrained` refuses what many published models hold (a temperature without sampling).
    """
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
