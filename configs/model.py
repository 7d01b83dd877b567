"""Which network a role runs, and how it is laid out in memory."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, Items, PathOrName, Strings
from configs.problems import as_written

Dtype = Literal["float32", "bfloat16"]
CHARACTER_TOKENS = 100
"""Of the tokenizer of models built here, see resources/models/character_tokenizer.py."""


class ModelShape(Config):
    """The numbers from which memory and arithmetic are estimated; also enough to build a fresh model."""

    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    """Key/value heads; the same as `num_heads` when left out."""
    head_width: Count | None = None
    """Width of one attention head where it is not hidden_size / num_heads."""
    vocab_size: Count
    tied_embeddings: bool = True
    """The output head is the embedding matrix."""
    max_positions: Count = 2048
    """Longest prompt + response the positions cover."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelShape":
        if self.head_width is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_heads {self.num_heads}; heads must divide the hidden size"
            )
        kv_heads = self.num_kv_heads or self.num_heads
        if self.num_heads % kv_heads:
            raise ValueError(f"num_kv_heads is {kv_heads}; it must divide num_heads ({self.num_heads})")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.hidden_size // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of all keys (or all values) of one token in one layer."""
        return (self.num_kv_heads or self.num_heads) * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, gated MLP, two norms."""
        query_width = self.num_heads * self.head_dim
        attention = 2 * self.hidden_size * query_width + 2 * self.hidden_size * self.kv_width
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of a Llama-shaped decoder: embeddings, layers, final norm; biases are left out."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size


class LoraConfig(Config):
    """Low-rank adapters through peft; the reference is then the actor with the adapter off."""

    rank: Count = 16
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Anything above 0 makes recomputed log-probs differ from the update's, so 0 is advised."""
    target_modules: Annotated[Strings, Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


class ModelConfig(Config):
    """A causal language model: a folder, a hub name, or `build: tiny` for one made here from `shape`."""

    path: PathOrName | None = None
    """Folder with config.json and safetensors, or a hub name. null with `build` makes a fresh model."""
    build: Literal["tiny"] | None = None
    """`tiny`: a Llama of `shape` with the character tokenizer, initialised from the run seed."""
    gguf_file: str | None = None
    """Name of a GGUF file inside `path`; transformers de-quantises it once into the run's cache."""
    tokenizer_path: PathOrName | None = None
    """Where the tokenizer lies when it is not in `path`."""
    shape: ModelShape | None = None
    """Needed by `build`, and by `plan` when no local config.json can be read."""
    dtype: Dtype = "float32"
    """Arithmetic of forward and backward; master weights stay float32 in training."""
    trust_remote_code: Literal[False] = False
    """Code shipped beside weights is never run; the key exists so that asking for it gets a clear answer."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    """Of what trains and scores. `flash_attention_2` needs the package flash-attn, an accelerator and bfloat16."""
    share_prompts: bool = True
    """A pass reads a prompt once for all its responses, and no padding, where `sdpa` attends to everything before."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more compute for far less memory."""
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _has_a_source(self) -> "ModelConfig":
        if (self.path is None) == (self.build is None):
            given = f"path is {as_written(self.path)} and build is {as_written(self.build)}"
            raise ValueError(f"{given}; give exactly one of them")
        if self.build is not None and self.shape is None:
            raise ValueError("build is 'tiny' but shape is missing; give model.shape the sizes to build")
        if self.build is not None and self.gguf_file is not None:
            raise ValueError(f"gguf_file is {self.gguf_file!r} beside build, and a model that is made here has no file")
        return self


class OptimizerConfig(Config):
    """AdamW with a warm-up and one of three schedules."""

    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 1e-6
    betas: Items[Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    max_grad_norm: Annotated[float, Field(ge=1e-6)] = 1.0
    """Global norm to which gradients are clipped; a non-finite norm skips the step and is counted."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: Count | None = None
    """Optimizer steps over which `linear` and `cosine` decay."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "OptimizerConfig":
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(
                f"schedule is {self.schedule!r} but total_steps is missing; say over how many steps it decays"
            )
        if self.schedule != "constant" and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and total_steps {self.total_steps}; the {self.schedule} schedule "
                "begins after the warm-up and ends at total_steps, so warmup_steps must be smaller"
            )
        if len(self.betas) != 2:
            raise ValueError(f"betas has {len(self.betas)} numbers; AdamW takes two")
        return self
