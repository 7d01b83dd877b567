"""The shape of a model from the config or from a local config.json. Nothing is ever fetched, and no code is run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.model import ModelConfig, ModelShape
from configs.problems import MISSING, ConfigError, Problem

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


def shape_of(path: str, model: ModelConfig) -> ModelShape:
    """The shape of the model at `path` of the config ("model", "critic.model").

    Raises:
        ConfigError: naming the shape's key, when neither it nor a local config.json is there.
    """
    if model.shape is not None:
        return model.shape
    file = Path(model.path or "").expanduser() / "config.json"
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
    found["tied_embeddings"] = bool(data.get("tie_word_embeddings", False))
    try:
        return ModelShape.model_validate(found)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        way_out = f"give {path}.shape in the config"
        raise ConfigError(
            "plan", [Problem(f"{path}.path", str(file), f"no shape can be read from it: {what}", way_out)]
        ) from None
