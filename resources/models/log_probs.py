"""Log-probabilities of given tokens, and entropies, without ever holding [B, T, vocabulary].

The hidden states that predict the wanted tokens are taken in chunks; the logits of a chunk live until the next one.
The backward pass makes them again, so memory is bounded by the chunk in both passes. Logits are cast to float32
before the log-softmax, and the temperature divides the logits: the distribution scored is the one sampled from.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def shift_to_targets(x: Tensor) -> Tensor:
    """Bring what stands at the state *before* a token to the position of the token: y[:, t] = x[:, t - 1], y[:, 0] = 0.

    x is [B, T, ...]: hidden states, or values read from them. The one shift of this code base: log-probs and values
    of `input_ids[:, t]` both come from the hidden state at t - 1, since the one at t has already seen the token.

    >>> shift_to_targets(torch.tensor([[5.0, 6.0, 7.0]])).tolist()
    [[0.0, 5.0, 6.0]]
    """
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def scatter_to_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Put `values` [N, ...] at the N true positions of `mask` [B, T], 0 elsewhere; differentiable in `values`."""
    places = mask.reshape(*mask.shape, *[1] * (values.dim() - 1))
    empty = torch.zeros((*mask.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return empty.masked_scatter(places, values)


def log_probs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The plain, whole computation: log-probs [...] of `targets` and entropies [...] of `logits` [..., V], float32."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What a model does between its last hidden state and its logits, besides the matrix product."""

    logit_scale: float = 1.0
    """Logits are multiplied by this (Cohere, Granite)."""
    softcap: float | None = None
    """Then c * tanh(logits / c) (Gemma)."""


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    shape: HeadShape = HeadShape(),
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), and the entropies [N] if wanted.

    Args:
        hidden: [N, H], the states that predict the targets.
        weight: [V, H]; a DTensor cut along the vocabulary is used as it lies (tensor parallel), with two small
            reductions a chunk in place of gathering logits.
        targets: token ids, [N] or several at each state, [N, M].
        temperature: divides the logits.
        chunk_tokens: rows of logits alive at one time.
        with_entropy: also return entropies, differentiable.
        bias: [V] of the head, where it has one.
        shape: scaling and soft cap of the logits.

    Returns:
        float32 log-probs in the shape of `targets`, never above 0, and entropies or None.
    """
    parts = _vocabulary_parts(weight)
    local_weight = weight.to_local() if isinstance(weight, DTensor) else weight
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    options = _Options(temperature, chunk_tokens, with_entropy, shape, *parts)
    several = targets if targets.dim() > 1 else targets[:, None]  # [N, M]
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden.to(local_weight.dtype), local_weight, local_bias, several, options
    )
    log_probs = log_probs.reshape(targets.shape)
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Options:
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    shape: HeadShape
    group: dist.ProcessGroup | None
    """Ranks that each hold a part of the vocabulary."""
    first_id: int
    """The first token id of this rank's part."""


def _vocabulary_parts(weight: Tensor) -> tuple[dist.ProcessGroup | None, int]:
    if not isinstance(weight, DTensor):
        return None, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.device_mesh.get_group(), int(offset[0])


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(targets.shape, dtype=torch.float32)  # [N, M]
        entropy = hidden.new_zeros(hidden.shape[0] if options.with_entropy else 0, dtype=torch.float32)
        normaliser = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        logits: Tensor | None = None
        for rows in _chunks(hidden.shape[0], options.chunk_tokens):
            logits = _logits(hidden[rows], weight, bias, options)
            normaliser[rows] = _log_normaliser(logits, options)
            log_probs[rows] = _of_targets(logits, targets[rows], options) - normaliser[rows, None]
            if options.with_entropy:
                logits.sub_(normaliser[rows, None])  # log p
                entropy[rows] = -_sum_over_ranks((logits.exp().mul_(logits)).sum(-1), options)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.options = options
        # The backward pass begins with the last chunk, right after this: its logits (log p with entropies) stay for it.
        is_wanted = any(ctx.needs_input_grad) and options.shape.softcap is None
        ctx.last_logits = logits if is_wanted else None
        return log_probs.clamp_(max=0.0), entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        last, ctx.last_logits = ctx.last_logits, None
        for rows in reversed(_chunks(hidden.shape[0], options.chunk_tokens)):
            is_log_p = last is not None and options.with_entropy
            logits = _logits(hidden[rows], weight, bias, options) if last is None else last
            last, slope = None, _softcap_slope(logits, options)
            # logits becomes d loss / d logits in place: g (1[target] - p) - h p (log p + H)
            log_p = logits if is_log_p else logits.sub_(normaliser[rows, None])
            grad = _grad_of_entropy(log_p, entropy[rows], grad_entropy[rows]) if options.with_entropy else None
            p = log_p.exp_().mul_(-grad_log_probs[rows].sum(-1, keepdim=True))
            if grad is not None:
                p.add_(grad)
            _add_at_targets(p, targets[rows], grad_log_probs[rows], options)
            p.mul_(options.shape.logit_scale / options.temperature)
            if slope is not None:
                p.mul_(slope)
            narrow = p.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(narrow.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias.add_(narrow.sum(0))
        if grad_hidden is not None and options.group is not None:
            dist.all_reduce(grad_hidden, group=options.group)
        return grad_hidden, grad_weight, grad_bias, None, None


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    bias: Tensor | None = None,
    shape: HeadShape = HeadShape(),
) -> tuple[Tensor, Tensor]:
    """Ids [N, count] and log-probs [N, count] of the likeliest tokens at each of the states `hidden` [N, H]."""
    options = _Options(temperature, chunk_tokens, False, shape, None, 0)
    ids = torch.empty((hidden.shape[0], count), dtype=torch.int64, device=hidden.device)
    log_probs = torch.empty((hidden.shape[0], count), dtype=torch.float32, device=hidden.device)
    for rows in _chunks(hidden.shape[0], chunk_tokens):
        logits = _logits(hidden[rows].to(weight.dtype), weight, bias, options)
        top, ids[rows] = logits.topk(count, dim=-1)
        log_probs[rows] = top - torch.logsumexp(logits, dim=-1, keepdim=True)
    return ids, log_probs


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    """Float32 logits [n, V] over the temperature, in memory of their own."""
    logits = (torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())).float()
    if options.shape.logit_scale != 1.0:
        logits.mul_(options.shape.logit_scale)
    if options.shape.softcap is not None:
        logits.div_(options.shape.softcap).tanh_().mul_(options.shape.softcap)
    return logits if options.temperature == 1.0 else logits.div_(options.temperature)


def _softcap_slope(logits: Tensor, options: _Options) -> Tensor | None:
    """d softcap(x) / dx = 1 - tanh(x / c)^2, from the capped logits."""
    cap = options.shape.softcap
    return None if cap is None else 1.0 - (logits * (options.temperature / cap)).square_()


def _log_normaliser(logits: Tensor, options: _Options) -> Tensor:
    if options.group is None:
        return torch.logsumexp(logits, dim=-1)
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=options.group)
    total = (logits - top[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=options.group)
    return total.log_().add_(top)


def _of_targets(logits: Tensor, targets: Tensor, options: _Options) -> Tensor:
    if options.group is None:
        return logits.gather(1, targets)
    place, is_mine = _own_targets(targets, logits.shape[1], options)
    chosen = torch.where(is_mine, logits.gather(1, place), 0.0)
    dist.all_reduce(chosen, group=options.group)
    return chosen


def _own_targets(targets: Tensor, size: int, options: _Options) -> tuple[Tensor, Tensor]:
    place = targets - options.first_id
    is_mine = (place >= 0) & (place < size)
    return place.clamp(0, size - 1), is_mine


def _add_at_targets(grad: Tensor, targets: Tensor, amount: Tensor, options: _Options) -> None:
    place, is_mine = _own_targets(targets, grad.shape[1], options)
    grad.scatter_add_(1, place, torch.where(is_mine, amount, 0.0))


def _sum_over_ranks(x: Tensor, options: _Options) -> Tensor:
    if options.group is not None:
        dist.all_reduce(x, group=options.group)
    return x


def _grad_of_entropy(log_p: Tensor, entropy: Tensor, grad: Tensor) -> Tensor:
    """d H / d logits = -p (log p + H), times the incoming gradient [n]; [n, V]."""
    return (log_p + entropy[:, None]).mul_(log_p.exp()).mul_(-grad[:, None])


def head_of(model: nn.Module) -> nn.Linear:
    """The output head of a causal language model. Raises ValueError for a model without one."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has {type(head).__name__} where a linear output head is expected")
    return head
