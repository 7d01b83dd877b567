"""Build or load a causal language model and its tokenizer from the configuration.

Any `transformers` causal LM: a folder, a hub name, a GGUF file, or a tiny Llama built here. Weights are float32 as
loaded; arithmetic in bfloat16 is the business of `sharding.py`. Code shipped beside weights is never run.
"""

import copy
import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from configs.model import ModelConfig, ModelShape
from resources.models.character_tokenizer import VOCAB_SIZE, build_character_tokenizer
from resources.models.generation_config import save_generation_config
from resources.models.row_attention import attend_by_rows
from resources.weight_files import WEIGHT_FILES, WeightFileError, check_weight_files, has_weights

CACHE = Path(os.environ.get("CALLSHEET_CACHE", "~/.cache/callsheet")).expanduser()
transformers_logging.disable_progress_bar()
LABELS = ("id2label", "label2id")
"""Of a classifier, where a name that says `drop` is the user's."""


_TEXT_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Of a model's folder: config, index of weights, tokenizer, chat template."""
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""What transformers raises for a folder with broken files: it reads JSON and takes it for what it should be."""


class ModelError(ValueError):
    """A model or tokenizer that cannot be used, and what to do about it."""


def build_causal_lm(model: ModelConfig, seed: int) -> PreTrainedModel:
    """The model in float32 on the CPU. `build: tiny` is a function of shape and seed alone.

    Raises ModelError for a folder without weights or a model that is no causal LM.
    """
    if model.build == "tiny":
        built = _build_tiny(_shape(model), model.attention, seed)
    else:
        model = _plain(model)
        config = load_model_config(model)
        disable_dropout(config)
        built = AutoModelForCausalLM.from_pretrained(
            _checked_path(model),
            config=config,
            dtype=torch.float32,
            attn_implementation=model.attention,
            trust_remote_code=False,
        )
    train_every_token(built)
    attend_by_rows(built)
    return built


def train_every_token(model: PreTrainedModel) -> None:
    """A padding index would silence the gradient of a token that real text may hold (pad is often end of sequence)."""
    model.get_input_embeddings().padding_idx = None  # pyright: ignore[reportArgumentType]


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """The architecture of the configured model."""
    if model.build == "tiny":
        return _tiny_config(_shape(model))
    return AutoConfig.from_pretrained(_checked_path(_plain(model)), trust_remote_code=False)


def own_config(model: ModelConfig, built: PretrainedConfig) -> PretrainedConfig:
    """What an export says of the model that was `built` from `model`: its own config, with the dropout it was given."""
    config = load_model_config(model)
    return config if type(config) is type(built) else config.get_text_config()


def build_skeleton(model: ModelConfig) -> nn.Module:
    """The layers of the configured model under their names, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_model_config(model), trust_remote_code=False)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, checked against the model's embeddings.

    Raises ModelError when it has more tokens than the model has embeddings, or no end-of-sequence token, or when
    padding and end of sequence are one token and no spare token exists.
    """
    model = _plain(model)
    try:
        tokenizer = _read_tokenizer(model)
        config = load_model_config(model)
    except ModelError:
        raise
    except _BROKEN as error:
        raise ModelError(_unreadable(model, error)) from error
    check_tokenizer(tokenizer, config)
    return tokenizer


def _unreadable(model: ModelConfig, error: Exception) -> str:
    where = model.path if model.tokenizer_path is None else model.tokenizer_path
    key = "model.path" if model.tokenizer_path is None else "model.tokenizer_path"
    told = (str(error).strip().splitlines() or [""])[0][:200]
    return (
        f"{key} is {where!r}, from which no tokenizer and config can be read ({type(error).__name__}: {told}); give a "
        "folder with config.json, weights and tokenizer.json, or the name of a model that can be reached"
    )


def _read_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    if model.tokenizer_path is not None:
        return AutoTokenizer.from_pretrained(model.tokenizer_path, trust_remote_code=False)
    if model.build == "tiny":
        return build_character_tokenizer(_shape(model).max_positions)
    packed = {} if model.gguf_file is None else {"gguf_file": model.gguf_file}
    return AutoTokenizer.from_pretrained(_checked_path(model), trust_remote_code=False, **packed)


def _plain(model: ModelConfig) -> ModelConfig:
    """The same model as a plain folder: a GGUF file is de-quantised once into the cache, for every role and run."""
    if model.gguf_file is None:
        return model
    return model.model_copy(update={"path": str(prepare_model_folder(model, 0)), "gguf_file": None})


def _dequantised(model: ModelConfig) -> PreTrainedModel:
    """The GGUF file's weights in float32, in a plain model that knows nothing of quantisation."""
    packed = AutoModelForCausalLM.from_pretrained(
        _checked_path(model), dtype=torch.float32, trust_remote_code=False, gguf_file=model.gguf_file
    )
    config = copy.deepcopy(packed.config)
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    plain.load_state_dict(packed.state_dict())
    plain.config.architectures = [type(plain).__name__]
    return plain


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise ModelError for a tokenizer that does not fit the model; give it a pad token where a spare one exists."""
    vocab_size = int(config.get_text_config().vocab_size)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if max(len(tokenizer), highest + 1) > vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocab_size} embeddings (its highest id is "
            f"{highest}); point model.tokenizer_path at the model's own tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token, so no response could ever end; use one that has")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer)


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, other: ModelConfig) -> None:
    """Raise ModelError for a model that is fed the policy's token ids and would read other tokens in them.

    A model saved without its tokenizer is only known to have an embedding for every id.
    """
    ids = tokenizer.get_vocab()
    size = int(load_model_config(other).get_text_config().vocab_size)
    if max(ids.values()) >= size:
        raise ModelError(
            f"{other.path} has {size} embeddings and is fed the policy's token ids, up to {max(ids.values())}; take a "
            "model of the policy's family"
        )
    if not any((Path(str(other.path)) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return
    theirs, special = _read_tokenizer(other).get_vocab(), set(tokenizer.all_special_tokens)
    moved = [token for token, number in ids.items() if token not in special and theirs.get(token) != number]
    if moved:
        raise ModelError(
            f"{other.path} is fed the policy's token ids and numbers {len(moved)} of {len(ids)} tokens otherwise, for "
            f"example {sorted(moved, key=ids.__getitem__)[:3]}; take a model of the policy's family"
        )


def _spare_token(tokenizer: PreTrainedTokenizerBase) -> str:
    known = tokenizer.get_vocab()
    for token in ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>"):
        if token in known and known[token] != tokenizer.eos_token_id:
            return token
    raise ModelError(
        f"the tokenizer's pad token and end-of-sequence token are both {tokenizer.eos_token!r}, and it has no spare "
        "token for padding; add one (tokenizer.add_special_tokens) and save the tokenizer to model.tokenizer_path"
    )


def prepare_model_folder(model: ModelConfig, seed: int, cache: Path = CACHE) -> Path:
    """A folder with config.json, safetensors and tokenizer that `transformers` and vLLM both load.

    A local folder is returned as it is. A tiny model is built and a GGUF file de-quantised once, into `cache`, under
    a name made from what they depend on; several processes may ask at the same time.
    """
    if model.build is None and model.gguf_file is None and model.tokenizer_path is None:
        path = _checked_path(model)
        return Path(path)
    target = cache / "models" / _fingerprint(model, seed)
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-", ignore_cleanup_errors=True) as scratch:
            staging = Path(scratch) / "model"
            loaded = _dequantised(model) if model.gguf_file is not None else build_causal_lm(model, seed)
            tokenizer = _read_tokenizer(model)
            check_tokenizer(tokenizer, loaded.config)
            save_model_folder(loaded, tokenizer, staging)
            _publish(staging, target)
    return target


def save_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (safetensors), config.json, tokenizer, and generation_config.json of a model that generates."""
    if model.can_generate():
        generation, model.generation_config = model.generation_config, GenerationConfig()
        model.save_pretrained(folder)
        model.generation_config = generation
        save_generation_config(generation, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        # Another process was first; its folder holds the same bytes.
        if not (target / "config.json").exists():
            raise


def _fingerprint(model: ModelConfig, seed: int) -> str:
    facts = model.model_dump(include={"build", "gguf_file", "shape"}, mode="json")
    if model.build is not None:
        facts["seed"] = seed
    weights = WEIGHT_FILES if model.gguf_file is None else (glob.escape(model.gguf_file),)
    facts["path"] = None if model.path is None else _identity(_checked_path(model), (*weights, *_TEXT_FILES))
    facts["tokenizer_path"] = None if model.tokenizer_path is None else _identity(model.tokenizer_path, _TEXT_FILES)
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"{model.build or Path(model.path or '').name}-{digest}"


def _identity(path: str, patterns: tuple[str, ...]) -> list[Any]:
    """What changes when a folder is another one or gets other files of these kinds; a hub name is its own identity."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    stats = {file.name: file.stat() for pattern in patterns for file in folder.glob(pattern)}
    return [str(folder.resolve()), sorted([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items())]


def _checked_path(model: ModelConfig) -> str:
    """`model.path`, once a local folder is known to hold a config and weights; hub names pass."""
    path = str(model.path)
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")):
            raise ModelError(
                f"model.path is {path!r}, which does not exist; give a folder with config.json and weights, or a name"
            )
        return path
    if model.gguf_file is not None:
        if not (folder / model.gguf_file).is_file():
            raise ModelError(
                f"model.gguf_file is {model.gguf_file!r}, which is not in {folder}; it holds {_names(folder)}"
            )
        return str(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path {folder} has no config.json; it holds {_names(folder)}")
    if not has_weights(folder):
        raise ModelError(f"model.path {folder} has a config.json but no weights; it needs *.safetensors beside it")
    try:
        check_weight_files(model)
    except WeightFileError as error:
        raise ModelError(str(error)) from error
    return str(folder)


def check_model_folder(model: ModelConfig) -> None:
    """Raise ModelError for a path that is no model: it does not exist, or its config or weights lack or are damaged."""
    if model.build is None:
        _checked_path(model)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())[:8]


def _shape(model: ModelConfig) -> ModelShape:
    if model.shape is None:
        raise ModelError("model.shape is missing; a built model needs its sizes")
    return model.shape


def _tiny_config(shape: ModelShape) -> LlamaConfig:
    if shape.vocab_size < VOCAB_SIZE:
        raise ModelError(
            f"model.shape.vocab_size is {shape.vocab_size}; the character tokenizer has {VOCAB_SIZE} tokens"
        )
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads or shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _build_tiny(shape: ModelShape, attention: str, seed: int) -> PreTrainedModel:
    config = _tiny_config(shape)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout of an architecture and of its sections to 0, in place: each number whose name says `drop`.

    It makes recomputed log-probs differ from those of the update, so it is off in every role. Architectures agree on no
    name for it (`attention_dropout`, `resid_pdrop`, `layerdrop`), but all say `drop`.
    """
    _without_dropout("", config)


def _without_dropout(name: str, value: Any) -> Any:
    if isinstance(value, PretrainedConfig | dict):
        settings: dict[Any, Any] = vars(value) if isinstance(value, PretrainedConfig) else value
        for key in settings.keys() - set(LABELS):
            settings[key] = _without_dropout(str(key), settings[key])
        return value
    if isinstance(value, list):
        return [_without_dropout(name, one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return type(value)(0) if is_number and "drop" in name.lower() else value
