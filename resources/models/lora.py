"""Low-rank adapters through peft: only they are trained, the reference is the model with them off, the export merges.

Merging happens on gathered copies, tensor by tensor, so exporting never touches the trainer's weights and can be
repeated without adding the adapter twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.model import LoraConfig
from resources.models.causal_lm import ModelError
from resources.models.published_folder import published_folder
from resources.models.sharding import whole_tensors

_ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> PreTrainedModel:
    """Freeze `model` and add trainable adapters, which change nothing until trained; a function of the seed.

    Raises ModelError, see `check_target_modules`.
    """
    check_target_modules(model, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)  # pyright: ignore[reportReturnType]


def check_target_modules(model: nn.Module, config: LoraConfig) -> None:
    """Raise ModelError for a target that no layer is called: peft passes over it as long as another one is there."""
    names = [name for name, part in model.named_modules() if not any(part.children())]
    unknown = [
        target for target in config.target_modules if not any(f".{name}".endswith(f".{target}") for name in names)
    ]
    if unknown:
        ends = sorted({name.rpartition(".")[2] for name in names})
        raise ModelError(f"lora.target_modules has {unknown}, which no layer of the model is called; it has {ends}")


def adapter_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """Layers with an adapter, by the name of the layer."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """The model as it was before training, for the length of the block."""
    layers = adapter_layers(module).values()
    for layer in layers:
        layer._disable_adapters = True  # the public switch also freezes the adapters, which a sharded model forbids
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under the names of the model without adapters, W + scale * B A where there is one.

    Every rank must run through them together. Without adapters: the parameters as they are.
    """
    layers = adapter_layers(module)
    deltas = {f"{name}.base_layer.weight": (name, layer) for name, layer in layers.items()}
    for name, tensor in whole_tensors(_without_adapters(module)):
        if name not in deltas:
            yield name.replace(".base_layer.", "."), tensor
            continue
        layer_name, layer = deltas[name]
        factors: list[tuple[str, Tensor]] = [
            (key, getattr(layer, key)[_ADAPTER].weight) for key in ("lora_A", "lora_B")
        ]
        whole = dict(whole_tensors(iter(factors)))
        yield f"{layer_name}.weight", tensor + layer.scaling[_ADAPTER] * (whole["lora_B"] @ whole["lora_A"])


def merged_names(module: nn.Module) -> list[str]:
    """The names `merged_tensors` yields."""
    return [name.replace(".base_layer.", ".") for name, _ in _without_adapters(module)]


def adapter_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone, whole, under the names peft saves them by. Every rank must run through them together."""
    for name, tensor in whole_tensors((name, p) for name, p in module.named_parameters() if ".lora_" in name):
        yield f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}", tensor


def export_adapter(folder: Path, config: LoraConfig, base: str, named: Iterator[tuple[str, Tensor]]) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base model, folder)` reads; published by one rename.

    `base` is the folder or hub name of the model that was adapted.
    """
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with published_folder(folder) as staging:
        save_file({name: tensor.cpu().contiguous() for name, tensor in named}, staging / "adapter_model.safetensors")
        settings.save_pretrained(str(staging))


def _without_adapters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if ".lora_" not in name)
