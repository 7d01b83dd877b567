"""What a worker minimises, as a value: `functools.partial(actor_objective, policy_loss="grpo", ...)`.

`td` holds the padded columns [B, T] of a micro-batch and the 0-dim global counts `num_response_tokens` and
`num_sequences` of its mini-batch. The loss is this micro-batch's share: summed over micro-batches and ranks it is the
loss of the mini-batch. Metrics are sums and counts (see `diagnostics`).
"""

import inspect
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from tasks.algorithms.diagnostics import COUNT, Metrics, mean_metric, policy_movement, sample_entropy
from tasks.algorithms.distillation import forward_kl_top_k, reverse_kl_losses
from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.losses import aggregate_loss, value_losses
from tasks.algorithms.masking import masked_sum, zero_masked
from tasks.algorithms.policy_losses import LOSS_COLUMNS, POLICY_LOSSES

Td = Mapping[str, Tensor]


def policy_loss_knobs(policy_loss: str) -> tuple[str, ...]:
    """Names of the numbers that a policy loss takes, for `actor_objective(..., **knobs)`.

    >>> policy_loss_knobs("kl_cov")
    ('covariance_kl_coef',)
    """
    if policy_loss not in POLICY_LOSSES:
        raise ValueError(f"policy loss is {policy_loss!r}; known are {sorted(POLICY_LOSSES)}")
    columns = LOSS_COLUMNS.get(policy_loss, ())
    parameters = inspect.signature(POLICY_LOSSES[policy_loss]).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in columns)


def actor_objective(
    log_probs: Float[Tensor, "B T"],
    entropy: Float[Tensor, "B T"] | None,
    td: Td,
    *,
    policy_loss: str,
    aggregation: str,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    teacher_kl_coef: float = 0.0,
    top_k_kl_coef: float = 0.0,
    max_response_length: int | None = None,
    **knobs: float | None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Loss of the actor on a micro-batch.

        L = agg(w l) - entropy_coef agg(H) + kl_coef agg(KL to reference) + teacher_kl_coef agg(KL to teacher)
            + top_k_kl_coef agg(KL from teacher, over its top k)

    l is the policy loss of the algorithm named by `policy_loss` with its own `knobs`, w the column
    `correction_weights` (1 where the batch has none), agg one of `losses.AGGREGATIONS`. All of it runs over
    `train_mask`, or over `response_mask` where the batch has no `train_mask`. `log_probs` and `entropy` carry gradient.
    Without a column `old_log_probs` the policy is the one that is about to be updated: rho is 1, with its gradient.

    Raises:
        ValueError: an entropy bonus without `entropy`.
    """
    mask = _trained(td)
    columns = {name: td[name] for name in LOSS_COLUMNS.get(policy_loss, ())}
    old_log_probs = td.get("old_log_probs")
    is_scored_here = old_log_probs is None
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    losses, metrics = POLICY_LOSSES[policy_loss](log_probs, old_log_probs, td["advantages"], mask, **columns, **knobs)
    if "correction_weights" in td:
        losses = losses * zero_masked(td["correction_weights"], mask)

    def aggregate(token_losses: Tensor) -> Tensor:
        return _aggregate(token_losses, mask, td, aggregation, max_response_length)

    loss = aggregate(losses)
    metrics |= _step_metric("actor/policy_loss", loss, td)
    if entropy is not None:
        metrics |= mean_metric("actor/entropy", entropy, mask)
        loss = loss - entropy_coef * aggregate(entropy)
    elif entropy_coef:
        raise ValueError(f"entropy_coef is {entropy_coef} and the worker computed no entropy")
    if kl_coef:
        kl = kl_per_token(log_probs, td["ref_log_probs"], mask, estimator=kl_estimator)
        metrics |= mean_metric("actor/kl_loss", kl, mask)
        if is_scored_here:  # else the advantage step has measured it
            metrics |= mean_metric("actor/reference_kl", masked_sum(kl, mask, dim=1), mask.any(dim=1))
        loss = loss + kl_coef * aggregate(kl)
    if teacher_kl_coef:
        kl = reverse_kl_losses(log_probs, td["teacher_log_probs"], mask)
        metrics |= mean_metric("actor/teacher_kl", kl, mask)
        loss = loss + teacher_kl_coef * aggregate(kl)
    if top_k_kl_coef:
        kl = forward_kl_top_k(td["top_k_log_probs"], td["teacher_top_k_log_probs"].float(), mask)
        metrics |= mean_metric("actor/teacher_forward_kl", kl, mask)
        loss = loss + top_k_kl_coef * aggregate(kl)
    metrics |= policy_movement(log_probs - old_log_probs, mask) | sample_entropy(log_probs, mask)
    return loss, metrics | _step_metric("actor/loss", loss, td)


def critic_objective(
    values: Float[Tensor, "B T"],
    td: Td,
    *,
    value_clip: float | None,
    aggregation: str = "token-mean",
    max_response_length: int | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Loss of the critic on a micro-batch: the clipped squared error (`losses.value_losses`), aggregated.

    `values` carries the gradient; `td["values"]` are the values from before the update and `td["returns"]` the targets.
    """
    mask = _trained(td)
    losses, moved = value_losses(values, td["values"], td["returns"], mask, value_clip=value_clip)
    loss = _aggregate(losses, mask, td, aggregation, max_response_length)
    return loss, {
        **_step_metric("critic/loss", loss, td),
        **mean_metric("critic/value", values, mask),
        **mean_metric("critic/clip_fraction", moved.float(), mask),
    }


def _trained(td: Td) -> Tensor:
    return td["train_mask"] if "train_mask" in td else td["response_mask"]


def _aggregate(token_losses: Tensor, mask: Tensor, td: Td, aggregation: str, max_response_length: int | None) -> Tensor:
    return aggregate_loss(
        token_losses,
        mask,
        aggregation=aggregation,
        num_response_tokens=td["num_response_tokens"],
        num_sequences=td["num_sequences"],
        max_response_length=max_response_length,
    )


def _step_metric(name: str, loss: Tensor, td: Td) -> Metrics:
    """A loss is a share of its step already; its count is the share of the step's tokens, which adds up to 1."""
    share = _trained(td).sum() / td["num_response_tokens"].clamp(min=1)
    return {name: loss.detach(), name + COUNT: share.to(torch.float32)}
