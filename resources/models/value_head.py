"""Scalar models on a language model's trunk: the critic (a value a token) and the reward model (a score a sequence)."""

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from configs.model import ModelConfig
from resources.models.causal_lm import (
    ModelError,
    build_causal_lm,
    disable_dropout,
    load_model_config,
    train_every_token,
)
from resources.models.log_probs import shift_to_targets
from resources.models.sequence_parallel import SequenceRanks


class ScalarModel(nn.Module):
    """A trunk and a linear head with one output, `score` as in `transformers`' own reward models."""

    def __init__(self, model: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.score = score
        self.sequence: SequenceRanks | None = None
        """The ranks each sequence is spread over; set by `lay_out`."""
        self.tokens_computed = 0
        """Tokens that went through the layers so far, padding included."""

    def forward(
        self, input_ids: Tensor, mask: Tensor, position_ids: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Values [B, T] float32: `values[b, t]` is read from the state before `input_ids[b, t]`; 0 outside `mask`.

        With `lengths` [B] also the value [B] of the state behind the last token.
        """
        outputs = self.read(input_ids, position_ids)
        values = values_before(outputs, mask)
        return values if lengths is None else (values, at_last_token(outputs, lengths))

    def read(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The head's output [B, T] float32 at every token, that token included."""
        if self.sequence is not None:
            position_ids, input_ids = self.sequence.positions(input_ids), self.sequence.own(input_ids)
        self.tokens_computed += input_ids.numel()
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        outputs = self.score(hidden.to(self.score.weight.dtype)).squeeze(-1).float()
        return outputs if self.sequence is None else self.sequence.gather(outputs)


def values_before(outputs: Tensor, mask: Tensor) -> Tensor:
    """The head's outputs [B, T] at every token as values of the states before the tokens; 0 outside `mask`."""
    return torch.where(mask, shift_to_targets(outputs), 0.0)


def at_last_token(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Of [B, T], the number [B] at the last of `lengths` [B] real tokens; nan for length 0."""
    last = outputs.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    return torch.where(lengths > 0, last, torch.nan)


class SequenceScorer(nn.Module):
    """A reward model: one score a sequence, read at its last token."""

    def __init__(self, scalar: ScalarModel) -> None:
        super().__init__()
        self.scalar = scalar

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the layers so far, padding included."""
        return self.scalar.tokens_computed

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Scores [B] float32 of right-padded `input_ids` [B, T] with `lengths` [B] real tokens; nan for length 0."""
        return at_last_token(self.scalar.read(input_ids), lengths)


def build_value_model(model: ModelConfig, seed: int, *, from_reward_model: bool = False) -> ScalarModel:
    """A critic: the trunk of the causal LM at `model` with a fresh head, or trunk and head of the reward model there.

    The fresh head is a function of the seed, with outputs small enough to start near 0.
    """
    if from_reward_model:
        return load_reward_model(model)
    lm = build_causal_lm(model, seed)
    trunk = getattr(lm, lm.base_model_prefix)
    hidden_size = int(lm.config.get_text_config().hidden_size)
    head = nn.Linear(hidden_size, 1, bias=False)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed + 1)
        head.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
    return ScalarModel(trunk, head)


def check_reward_model(model: ModelConfig) -> PretrainedConfig:
    """The architecture of a reward model saved as a sequence classifier with one label.

    Raises ModelError for a folder that holds something else: a fresh head would give scores without meaning.
    """
    if model.path is None:
        raise ModelError(
            "a reward model is loaded from model.path; a model built from a shape has never seen a preference"
        )
    config = load_model_config(model)
    kinds = [name for name in (config.architectures or []) if name.endswith("ForSequenceClassification")]
    if not kinds or config.num_labels != 1:
        raise ModelError(
            f"{model.path} holds {config.architectures} with {config.num_labels} labels; a reward model is a "
            "...ForSequenceClassification with one label (problem: no trained scalar head to read a score from)"
        )
    return config


def load_reward_model(model: ModelConfig) -> ScalarModel:
    """Trunk and head of a reward model, as fit for training as `build_causal_lm` makes a language model.

    Raises ModelError, see `check_reward_model`.
    """
    config = check_reward_model(model)
    disable_dropout(config)
    loaded = AutoModelForSequenceClassification.from_pretrained(
        str(model.path),
        config=config,
        dtype=torch.float32,
        attn_implementation=model.attention,
        trust_remote_code=False,
    )
    train_every_token(loaded)
    head = loaded.score
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{model.path} has a {type(head).__name__} as its head; a linear head called `score` is expected"
        )
    return ScalarModel(getattr(loaded, loaded.base_model_prefix).float(), head.float())
