"""Sequence parallelism (Ulysses): a rank holds a stretch of the tokens; attention sees whole sequences of some heads.

Around attention an all-to-all swaps [all heads, own tokens] for [own heads, all tokens] and back (Jacobs et al. 2023,
arXiv 2309.14509). Everything else works token by token. The loss is then computed on every rank from gathered
log-probs, so each rank's backward pass yields its own tokens' share of the gradient, and shares are summed.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from resources.models.causal_lm import ModelError
from resources.models.sharding import CommunicationClock


class SequenceRanks:
    """The ranks that share each sequence, and this one's stretch of it."""

    def __init__(self, group: dist.ProcessGroup, clock: CommunicationClock) -> None:
        self.group, self.clock = group, clock
        self.size, self.rank = group.size(), group.rank()

    def own(self, x: Tensor) -> Tensor:
        """This rank's stretch of `x` [B, T, ...]; T must be a multiple of the number of ranks."""
        if x.shape[1] % self.size:
            raise ValueError(
                f"{x.shape[1]} tokens do not divide over {self.size} sequence-parallel ranks; pad to a multiple"
            )
        return x.chunk(self.size, dim=1)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """The whole [B, T] from each rank's stretch [B, T / size]; the gradient of the own stretch flows back."""
        return _Gather.apply(x, self)

    def positions(self, input_ids: Tensor) -> Tensor:
        """Positions [1, T / size] of this rank's tokens in the whole sequence."""
        width = input_ids.shape[1] // self.size
        return torch.arange(self.rank * width, (self.rank + 1) * width, device=input_ids.device).unsqueeze(0)


def use_ulysses(model: PreTrainedModel, ranks: SequenceRanks) -> None:
    """Switch the attention of `model` to the all-to-all form.

    Raises ModelError when the ranks do not divide the heads, and for sliding-window attention: its mask is not built.
    """
    config = model.config.get_text_config()
    facts = config.to_dict()
    heads = int(facts["num_attention_heads"])
    if heads % ranks.size:
        raise ModelError(
            f"sequence_parallel is {ranks.size} and the model has {heads} heads; the ranks must divide the heads"
        )
    if facts.get("sliding_window") and facts.get("use_sliding_window", True):
        raise ModelError(
            f"sequence_parallel is {ranks.size} and the model attends through a sliding window; set it to 1"
        )
    name = f"callsheet_ulysses_{id(ranks)}"

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        return _attend(query, key, value, scaling, ranks), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)


def _no_mask(*_: Any, **__: Any) -> None:
    """Causal attention over right-padded rows needs no mask: no real token ever looks at padding."""


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, ranks: SequenceRanks) -> Tensor:
    """query [B, heads, t, d], key and value [B, kv heads, t, d] of own tokens -> [B, t, heads, d]."""
    group_size = query.shape[1] // key.shape[1]
    if key.shape[1] % ranks.size:
        # Too few key/value heads to deal out: each is copied for the query heads it serves.
        key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
        group_size = 1
    query, key, value = (_Swap.apply(x, ranks, True) for x in (query, key, value))  # [B, heads / size, T, d]
    key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return _Swap.apply(output, ranks, False).transpose(1, 2)


class _Swap(torch.autograd.Function):
    """[B, heads, t, d] with all heads and own tokens <-> [B, heads / size, T, d] with own heads and all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SequenceRanks, to_heads: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _swap(x, ranks, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _swap(grad, ctx.ranks, not ctx.to_heads), None, None


def _swap(x: Tensor, ranks: SequenceRanks, to_heads: bool) -> Tensor:
    cut_dim, join_dim = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(ranks.size, dim=cut_dim)).contiguous()
    received = torch.empty_like(sent)
    with ranks.clock:
        dist.all_to_all_single(received, sent, group=ranks.group)
    return torch.cat(list(received.unbind(0)), dim=join_dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SequenceRanks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks = ranks
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        with ranks.clock:
            dist.all_gather(parts, x.contiguous(), group=ranks.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Every rank computes the same loss from the same gathered values, so its own slice is the whole gradient.
        return ctx.ranks.own(grad).contiguous(), None
