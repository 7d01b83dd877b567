"""A causal language model as the policy: token ids in, log-probs and entropies out, logits never whole.

It is one module, so that sharding wraps trunk and head together and all of it runs inside one forward call.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from resources.models.causal_lm import ModelError
from resources.models.log_probs import (
    HeadShape,
    chunked_log_probs,
    head_of,
    likeliest_tokens,
    scatter_to_mask,
    shift_to_targets,
)
from resources.models.packed_rows import can_pack, pack_rows
from resources.models.sequence_parallel import SequenceRanks

_PROBE_TOLERANCE = 1e-3
"""Difference of logits, relative to their size, that rounding explains; a transform we missed is far larger."""


class PolicyModel(nn.Module):
    """The policy of `model`, scored `chunk_tokens` rows of logits at a time.

    Raises ModelError when the logits of `model` are not what its head makes of its last hidden state (times a scale,
    soft-capped, as its config says): such a head would be scored wrongly.
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int = 1024, shares_prompts: bool = False) -> None:
        super().__init__()
        self.lm = model
        self.sequence: SequenceRanks | None = None
        """The ranks each sequence is spread over, which shares no prompts; set by `lay_out`."""
        self.chunk_tokens = chunk_tokens
        self.head_shape = _head_shape(model)
        _probe(model, self.head_shape)
        self.shares_prompts = shares_prompts and can_pack(model, self.trunk)
        self.tokens_computed = 0
        """Tokens that went through the layers so far, padding included."""

    @property
    def trunk(self) -> nn.Module:
        """Everything below the head."""
        return getattr(self.lm, self.lm.base_model_prefix)

    def forward(
        self,
        input_ids: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        position_ids: Tensor | None = None,
        candidates: Tensor | None = None,
        top_k: int | None = None,
    ) -> tuple[Any, ...]:
        """Log-probs of the tokens where `mask` holds, 0 elsewhere.

        Args:
            input_ids: [B, T] right-padded; the padding may hold any valid id, causal attention never reaches it.
            mask: [B, T] bool; position 0 has no log-prob and must be False, so must the first token of a packed row.
            temperature: of the sampling distribution.
            with_entropy: also return [B, T] entropies.
            position_ids: [B, T], only for rows that hold several sequences, each starting at position 0.
            candidates: [B, T, K] token ids; at each position, tokens that might have stood there.
            top_k: give the K likeliest tokens of each position where `mask` holds.

        Returns:
            float32 log-probs [B, T], entropies or None, and
            with `candidates` the log-probs [B, T, K] of these tokens,
            with `top_k` ids [N, K] and log-probs [N, K] of the N masked positions, row by row.

        Raises:
            ModelError: `candidates` or `top_k` of a sequence or a vocabulary that is spread over ranks.
        """
        if (candidates is not None or top_k is not None) and (
            self.sequence is not None or isinstance(head_of(self.lm).weight, DTensor)
        ):
            raise ModelError(
                "several tokens a position are scored on whole sequences and a whole vocabulary; set tensor_parallel "
                "and sequence_parallel of this role to 1"
            )
        # At each state: the token that comes next, and whether it is wanted.
        next_ids, next_mask = _following(input_ids), _following(mask)
        if self.sequence is not None:
            position_ids = self.sequence.positions(input_ids)
            input_ids, next_ids, next_mask = (self.sequence.own(x) for x in (input_ids, next_ids, next_mask))
        head = head_of(self.lm)
        states, targets = self._states(input_ids, next_mask, position_ids), next_ids[next_mask]  # [N, H], [N]
        if candidates is not None:
            targets = torch.cat([targets[:, None], _following(candidates)[next_mask]], dim=1)  # [N, 1 + K]
        log_probs, entropy = chunked_log_probs(
            states,
            head.weight,
            targets,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
            bias=head.bias,
            shape=self.head_shape,
        )
        entropies = None if entropy is None else self._at_targets(entropy, next_mask)
        if top_k is not None:
            likeliest = likeliest_tokens(
                states, head.weight, top_k, temperature, self.chunk_tokens, head.bias, self.head_shape
            )
            return self._at_targets(log_probs, next_mask), entropies, *likeliest
        if candidates is None:
            return self._at_targets(log_probs, next_mask), entropies
        placed = self._at_targets(log_probs, next_mask)  # [B, T, 1 + K]
        return placed[..., 0], entropies, placed[..., 1:]

    def _states(self, input_ids: Tensor, next_mask: Tensor, position_ids: Tensor | None) -> Tensor:
        """Last hidden states [N, H] where `next_mask` holds."""
        if self.shares_prompts and position_ids is None:
            packed = pack_rows(input_ids, next_mask)
            if packed is not None:
                self.tokens_computed += packed.input_ids.numel()
                return packed.states(self.trunk)
        self.tokens_computed += input_ids.numel()
        hidden = self.trunk(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return hidden[next_mask]

    def _at_targets(self, values: Tensor, next_mask: Tensor) -> Tensor:
        """Values [N, ...] of wanted states -> [B, T, ...] at the tokens they speak of."""
        states = scatter_to_mask(values, next_mask)
        return shift_to_targets(states if self.sequence is None else self.sequence.gather(states))


def _following(x: Tensor) -> Tensor:
    """y[:, t] = x[:, t + 1], 0 at the end: what `shift_to_targets` undoes."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _head_shape(model: PreTrainedModel) -> HeadShape:
    facts = model.config.get_text_config().to_dict()
    scale = float(facts.get("logit_scale") or 1.0) / float(facts.get("logits_scaling") or 1.0)
    return HeadShape(logit_scale=scale, softcap=facts.get("final_logit_softcapping"))


@torch.no_grad()
def _probe(model: PreTrainedModel, shape: HeadShape) -> None:
    training = model.training
    model.eval()
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device)
    trunk, head = getattr(model, model.base_model_prefix), head_of(model)
    logits = head(trunk(input_ids=ids, use_cache=False).last_hidden_state) * shape.logit_scale
    if shape.softcap is not None:
        logits = torch.tanh(logits / shape.softcap) * shape.softcap
    expected = model(input_ids=ids, use_cache=False).logits
    model.train(training)
    gap = float((logits - expected).abs().max())
    if not gap <= _PROBE_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(
            f"{type(model).__name__} changes its logits by {gap:.3g} after the output head in a way that is not known "
            "here; log-probs would be wrong. Known are logit_scale, logits_scaling and final_logit_softcapping"
        )
