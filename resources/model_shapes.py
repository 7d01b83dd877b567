"""The shape of a model from the config or from a local config.json. Nothing is ever fetched, and no code is run."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.model import ModelConfig, ModelShape
from configs.problems import MISSING, UNSAID, ConfigError, Problem

_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
}
"""Our name -> what Hugging Face's config.json calls it."""

TIED_BY_DEFAULT = {
    "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_bigcode",
    "gpt_neo", "mpt", "opt", "smollm3", "starcoder2",
}  # fmt: skip
UNTIED_BY_DEFAULT = {
    "apertus", "arcee", "deepseek_v2", "deepseek_v3", "exaone4", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss",
    "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "stablelm",
}  # fmt: skip
"""What `transformers` takes a missing `tie_word_embeddings` for, by `model_type`; a type in neither is left unsaid."""


def shape_contradictions(models: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """Sizes in the config that the model's own config.json tells otherwise; `models` by their paths in the config."""
    for path, model in models.items():
        file = Path(model.path or "") / "config.json"
        if model.shape is None or model.path is None or model.gguf_file is not None or not os.path.isfile(file):
            continue
        try:
            told = read_shape(path, file, json.loads(file.read_text(encoding="utf-8")))
        except (ConfigError, OSError, RecursionError, ValueError, TypeError, AttributeError):
            continue  # whoever loads the model says what is wrong with the file
        for name in sorted(model.shape.model_fields_set & told.model_fields_set):
            given, own = getattr(model.shape, name), getattr(told, name)
            if given is not None and given != own:
                way_out = f"leave {path}.shape out"
                yield Problem(f"{path}.shape.{name}", given, f"{file} says {own}", way_out)


def position_problems(shapes: Mapping[str, ModelShape], longest: int) -> Iterator[Problem]:
    """Models whose own config.json has fewer positions than the longest row of tokens."""
    for path, shape in shapes.items():
        if "max_positions" in shape.model_fields_set and shape.max_positions < longest:
            rule = f"the model has {shape.max_positions} positions, and prompt + response take up to {longest}"
            way_out = "lower data.max_prompt_length or rollout.max_response_length"
            yield Problem(f"{path}.path", UNSAID, rule, way_out)


def shape_of(path: str, model: ModelConfig) -> ModelShape:
    """The shape of the model at `path` of the config ("model", "critic.model").

    Raises:
        ConfigError: naming the shape's key, when neither it nor a local config.json is there.
    """
    if model.shape is not None:
        return model.shape
    file = Path(model.path or "") / "config.json"
    if model.path is not None and model.path.startswith((".", "/", "~")) and not os.path.isdir(file.parent):
        rule = "there is no such folder, so nothing tells the model's shape"
        raise ConfigError("plan", [Problem(f"{path}.path", model.path, rule, f"correct it, or give {path}.shape")])
    if model.path is None or not os.path.isfile(file):  # Path.is_file raises for a name that is too long
        rule = f"{path}.path is {model.path!r}, where no local config.json is, and nothing is fetched to plan"
        way_out = f"give {path}.shape: num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, vocab_size"
        raise ConfigError("plan", [Problem(f"{path}.shape", MISSING, rule, way_out)])
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds {data!r:.40}")
    except (OSError, RecursionError, ValueError) as error:
        rule = f"it is not JSON that tells a shape ({error})"
        raise ConfigError(
            "plan", [Problem(f"{path}.path", str(file), rule, f"repair it, or give {path}.shape")]
        ) from None
    return read_shape(path, file, data)


def read_shape(path: str, file: str | Path, data: Mapping[str, Any]) -> ModelShape:
    """The shape that the keys of a config.json tell; `path` and `file` are for the message. Raises ConfigError."""
    found: dict[str, Any] = {}
    for ours, theirs in _NAMES.items():
        value = next((data[name] for name in theirs if data.get(name) is not None), None)
        if value is not None:
            found[ours] = value
    if "intermediate_size" not in found and "hidden_size" in found:
        found["intermediate_size"] = 4 * found["hidden_size"]  # GPT-2's n_inner: null means four times
    is_tied = data.get("tie_word_embeddings")
    if is_tied is None and data.get("model_type") in TIED_BY_DEFAULT | UNTIED_BY_DEFAULT:
        is_tied = data["model_type"] in TIED_BY_DEFAULT
    if is_tied is not None:
        found["tied_embeddings"] = bool(is_tied)
    try:
        return ModelShape.model_validate(found)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        way_out = f"give {path}.shape in the config"
        raise ConfigError(
            "plan", [Problem(f"{path}.path", str(file), f"no shape can be read from it: {what}", way_out)]
        ) from None
