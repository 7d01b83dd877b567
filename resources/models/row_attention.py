"""Attention row by row over tokens that lie packed: the rest of a model never meets padding, nor a prompt twice.

A pass holds each of its N distinct tokens once, [1, N]. Before attending, queries, keys and values are dealt out to
the rows they belong to, [B, T], where attention is plainly causal; the outcome is packed again. So attention costs
what it costs for rows apart, needs no mask, and everything between two attentions works on N tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "callsheet_rows"
LONGEST_OF_MATMULS = 384
"""Tokens of a row; above, the kernel of `sdpa` is as good (2 cores of an EPYC: 2.9 times slower at 62, 1.8 at 158)."""
_SCORES_BYTES = 1 << 23
"""Scores that are in memory at one time, a row's at least."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which packed token stands where in which row."""

    place: Tensor
    """[B, T]: the packed token at each position of each row; any one where the row has ended."""
    origin: Tensor
    """[N]: a place among the B * T where the packed token stands."""

    def deal_out(self, x: Tensor) -> Tensor:
        """[1, heads, N, d] -> [B, heads, T, d]; a token that stands in several rows sums their gradients."""
        heads, width = x.shape[1], x.shape[3]
        # Not index_select, whose backward pass on a GPU adds in an order that differs from run to run.
        dealt = F.embedding(self.place, x.transpose(1, 2).reshape(-1, heads * width))
        return dealt.view(*self.place.shape, heads, width).transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, heads, d] -> [1, N, heads, d]."""
        return F.embedding(self.origin, x.flatten(2).flatten(0, 1)).view(1, -1, *x.shape[2:])


def attend_by_rows(model: PreTrainedModel) -> bool:
    """Let a model that attends by `sdpa` take `rows` in its passes; without them it attends as before."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return model.config.get_text_config()._attn_implementation == NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if rows is None:
        return _attend_apart(module, query, key, value, attention_mask, options), None
    query, key, value = (rows.deal_out(x) for x in (query, key, value))
    return rows.pack(_attend_apart(module, query, key, value, None, options)), None


def _attend_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads, d]."""
    is_causal = bool(options.get("is_causal", getattr(module, "is_causal", True)))
    scaling, dropout = options.get("scaling"), options.get("dropout", 0.0)
    if mask is None and is_causal and not dropout and _matmuls_are_faster(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _MatmulAttention.apply(query, key, value, scale).transpose(1, 2)  # pyright: ignore[reportReturnType]
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


def _matmuls_are_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    tokens = query.shape[2]
    is_half = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_half and tokens == key.shape[2] <= LONGEST_OF_MATMULS and key.shape == value.shape


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _MatmulAttention(torch.autograd.Function):
    """Causal attention in bfloat16 by matrix products, scores and softmax in float32; nothing of size T x T is kept.

    Its errors against float64 are of the size of those of the kernel in `sdpa`.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        outputs = [_weights(q, k, scale) @ v for q, k, v in _parts(query, key, value)]
        return torch.cat(outputs).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value = ctx.saved_tensors
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for q, k, v, g in _parts(query, key, value, grad):
            weights = _weights(q, k, ctx.scale)
            towards_weights = g @ v.transpose(-1, -2)
            exact = torch.ops.aten._softmax_backward_data(towards_weights.float(), weights.float(), -1, torch.float32)
            towards_scores = exact.mul_(ctx.scale).to(q.dtype)
            found.append((towards_scores @ k, towards_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g))
        grads = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return grads[0].view(query.shape), grads[1], grads[2], None


def _parts(query: Tensor, key: Tensor, value: Tensor, *like_query: Tensor) -> list[tuple[Tensor, ...]]:
    """Some rows at a time: queries of the heads that share a key together, [b, kv heads, group * T, d]."""
    rows, kv_heads, tokens, width = key.shape
    step = max(1, _SCORES_BYTES // (4 * query.shape[1] * tokens * tokens))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        q, *more = (
            x[part].reshape(-1, kv_heads, query.shape[1] // kv_heads * tokens, width) for x in (query, *like_query)
        )
        parts.append((q, key[part], value[part], *more))
    return parts


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal attention weights [b, kv heads, group * T, T]."""
    tokens = key.shape[2]
    scores = (query.float() * scale) @ key.float().transpose(-1, -2)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores.unflatten(2, (-1, tokens)).masked_fill_(later, float("-inf"))
    return torch.softmax(scores, dim=-1).to(query.dtype)
