"""The advantage step as one function of columns: placement of rewards, KL in the reward, the estimator, the correction.

It sees the whole rollout batch, so whatever is a statistic of the batch (whitening, groups, covariance) is computed
here and never per micro-batch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.algorithms.covariance import select_clip_cov, select_kl_cov, token_covariance
from tasks.algorithms.diagnostics import COUNT, Metrics, explained_variance, finite_mean_metric, mean_metric
from tasks.algorithms.distillation import teacher_advantages
from tasks.algorithms.estimators import ESTIMATOR_COLUMNS, ESTIMATORS, Knobs, Rewards
from tasks.algorithms.group_advantages import groups_with_signal, rollout_votes
from tasks.algorithms.kl import kl_per_token
from tasks.algorithms.masking import masked_sum, whiten, zero_masked
from tasks.algorithms.numbers import as_float
from tasks.algorithms.off_policy import rollout_correction
from tasks.algorithms.token_rewards import spread_scores

CLIP_COV_BOUNDS = (1.0, 5.0)
"""Covariances between which Clip-Cov draws its tokens, as in the paper's experiments."""


def columns_read(
    *,
    estimator: str,
    kl_in_reward: bool = False,
    correction: str = "off",
    teacher_coef: float = 0.0,
    bootstrap_truncated: bool = False,
) -> tuple[str, ...]:
    """Columns that `estimate_advantages` cannot do without under these settings.

    >>> columns_read(estimator="ppo", kl_in_reward=True)
    ('response_mask', 'scores', 'group_ids', 'values', 'old_log_probs', 'ref_log_probs')
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; known are {sorted(ESTIMATORS)}")
    names = ["response_mask", *(() if estimator == "distillation" else ("scores", "group_ids"))]
    names += ESTIMATOR_COLUMNS.get(estimator, ())
    names += ["old_log_probs", "ref_log_probs"] if kl_in_reward else []
    names += ["old_log_probs", "rollout_log_probs"] if correction != "off" else []
    names += ["old_log_probs", "teacher_log_probs"] if teacher_coef != 0.0 else []
    names += ["bootstrap_values", "finish_reasons"] if bootstrap_truncated else []
    return tuple(dict.fromkeys(names))


def estimate_advantages(
    columns: Mapping[str, Tensor],
    *,
    estimator: str,
    gamma: float,
    gae_lambda: float,
    whiten_advantages: bool,
    scale_by_std: bool,
    kl_coef: float = 0.0,
    kl_in_reward: bool = False,
    kl_estimator: str = "k1",
    pass_k: int = 1,
    pass_threshold: float = 0.5,
    bootstrap_truncated: bool = False,
    task_weight: float = 1.0,
    teacher_coef: float = 0.0,
    correction: str = "off",
    correction_lower: float = 0.0,
    correction_upper: float = 2.0,
    covariance_fraction: float = 2e-4,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Metrics]:
    """Turn the scores of a rollout batch into advantages.

    Reads the columns that `columns_read` names, padded to [B, T] or one number a row, [B]; `scores` is nan where a row
    is unscorable. Where `ref_log_probs` is there, the KL to the reference is measured; `kl_in_reward` subtracts
    kl_coef * KL from the rewards of tokens, and for estimators of whole responses from the score. `rollout_ids`, when
    there, gives one vote per rollout. The estimator's advantages are multiplied by `task_weight`, and `teacher_coef`
    adds the teacher's advantages of tokens to them.

    Returns:
        new columns [B, T]: `token_rewards`, `advantages`, `train_mask` (sampled tokens of scorable rows that the
        correction keeps: the losses and their global counts go by it), and where they apply `returns` (a critic),
        `correction_weights` (a correction), `selected_mask` (clip_cov, kl_cov); and metrics.

    Raises:
        ValueError: an unknown estimator; a column that is missing, of another shape, or nan at a sampled token; an
            advantage that is not finite. Each names the column and the row.
    """
    needed = columns_read(
        estimator=estimator,
        kl_in_reward=kl_in_reward,
        correction=correction,
        teacher_coef=teacher_coef,
        bootstrap_truncated=bootstrap_truncated,
    )
    _check_columns(columns, needed)
    rewards, metrics = _place_rewards(columns, kl_coef if kl_in_reward else 0.0, kl_estimator)
    knobs = Knobs(
        gamma=gamma, gae_lambda=gae_lambda, scale_by_std=scale_by_std, pass_k=pass_k, pass_threshold=pass_threshold,
        bootstrap_truncated=bootstrap_truncated,
    )  # fmt: skip
    advantages, returns = ESTIMATORS[estimator](rewards, knobs)
    new, gap = _correct(columns, rewards.mask, correction, correction_lower, correction_upper)
    new["token_rewards"] = rewards.token
    metrics |= gap
    if returns is not None:
        new["returns"] = returns
        metrics |= _critic_metrics(columns["values"], returns, rewards.mask)
    if whiten_advantages:
        advantages = whiten(advantages, new["train_mask"])
    advantages, taught = _with_teacher(task_weight * advantages, columns, rewards.mask, teacher_coef)
    metrics |= taught
    new["advantages"] = zero_masked(advantages, new["train_mask"])
    _refuse("advantages", ~new["advantages"].isfinite(), "is not finite")
    if estimator in ("clip_cov", "kl_cov"):
        new["selected_mask"] = _select_tokens(columns, new, estimator, covariance_fraction, seed)
    return new, metrics | mean_metric("advantage/magnitude", new["advantages"].abs(), new["train_mask"])


def _with_teacher(
    advantages: Tensor, columns: Mapping[str, Tensor], mask: Tensor, teacher_coef: float
) -> tuple[Tensor, Metrics]:
    """The task's advantages with the teacher's added, and how far apart student and teacher are."""
    if "teacher_log_probs" not in columns:
        return advantages, {}
    pull = teacher_advantages(columns["old_log_probs"], columns["teacher_log_probs"], mask)
    return advantages + teacher_coef * pull, mean_metric("teacher/reverse_kl", -pull, mask)


def _check_columns(columns: Mapping[str, Tensor], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(f"the advantage step lacks columns {missing}; it has {sorted(columns)}")
    mask = columns["response_mask"]
    for name, column in columns.items():
        if column.shape not in (mask.shape, mask.shape[:1]):
            raise ValueError(f"column {name!r} has shape {tuple(column.shape)}; response_mask has {tuple(mask.shape)}")
        if column.shape == mask.shape and column.is_floating_point() and name in needed:
            _refuse(name, column.isnan() & mask, "is nan")


def _refuse(name: str, is_bad: Tensor, what: str) -> None:
    if is_bad.any():
        row, token = (int(index) for index in is_bad.nonzero()[0])
        raise ValueError(f"column {name!r} {what} at row {row}, token {token} ({int(is_bad.sum())} tokens in all)")


def _place_rewards(columns: Mapping[str, Tensor], kl_coef: float, kl_estimator: str) -> tuple[Rewards, Metrics]:
    response_mask = columns["response_mask"]
    has_scores = "scores" in columns  # pure distillation has none
    nothing = torch.zeros(response_mask.shape[0], device=response_mask.device)
    scores = as_float(columns["scores"]) if has_scores else nothing
    is_scorable = ~scores.isnan()
    mask = response_mask & is_scorable[:, None]
    token, sequence = spread_scores(scores, response_mask), scores
    metrics = _score_metrics(scores, columns["group_ids"], columns.get("rollout_ids")) if has_scores else {}
    metrics |= {
        "reward/unscorable_rows": (~is_scorable).sum().float(),
        "reward/rows_without_tokens": (~response_mask.any(dim=1)).sum().float(),
    }
    if "ref_log_probs" in columns:
        kl = kl_per_token(columns["old_log_probs"], columns["ref_log_probs"], mask, estimator=kl_estimator)
        sequence_kl = masked_sum(kl, mask, dim=1)
        # A row without a trained token has no KL: counting it as 0 would mislead the controller of the coefficient.
        metrics |= mean_metric("actor/reference_kl", sequence_kl, mask.any(dim=1))
        token, sequence = token - kl_coef * kl, sequence - kl_coef * sequence_kl
    return Rewards(token=token, sequence=sequence, mask=mask, columns=columns), metrics


def _correct(
    columns: Mapping[str, Tensor], mask: Tensor, mode: str, lower: float, upper: float
) -> tuple[dict[str, Tensor], Metrics]:
    """The trained mask, and with a correction the weights; how far engine and actor are apart is told either way."""
    if mode == "off":
        both = ("old_log_probs", "rollout_log_probs")
        if any(name not in columns for name in both):
            return {"train_mask": mask}, {}
        gap = zero_masked(columns[both[0]] - columns[both[1]], mask).abs()
        return {"train_mask": mask}, mean_metric("rollout/log_prob_gap", gap, mask)
    weights, kept, metrics = rollout_correction(
        columns["old_log_probs"], columns["rollout_log_probs"], mask, mode=mode, lower=lower, upper=upper
    )
    return {"train_mask": kept, "correction_weights": weights}, metrics


def score_mean(name: str, scores: Tensor, rollout_ids: Tensor | None) -> Metrics:
    """Mean over the scorable rollouts; one of several segments is one score."""
    votes = rollout_votes(~scores.isnan(), rollout_ids)
    return {name: masked_sum(votes * scores, votes > 0), name + COUNT: votes.sum()}


def _score_metrics(scores: Tensor, group_ids: Tensor, rollout_ids: Tensor | None) -> Metrics:
    has_signal = groups_with_signal(scores, group_ids)
    every_group = torch.ones_like(has_signal)
    return {
        **score_mean("reward/score_mean", scores, rollout_ids),
        **mean_metric("reward/groups_with_signal", has_signal.float(), every_group),
    }


def _critic_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> Metrics:
    explained = explained_variance(values, returns, mask)
    return finite_mean_metric("critic/explained_variance", explained) | mean_metric("critic/return", returns, mask)


def _select_tokens(
    columns: Mapping[str, Tensor], new: Mapping[str, Tensor], estimator: str, fraction: float, seed: int
) -> Tensor:
    mask = new["train_mask"]
    covariance = token_covariance(columns["old_log_probs"], new["advantages"], mask)
    if estimator == "kl_cov":
        return select_kl_cov(covariance, mask, fraction=fraction)
    lower, upper = CLIP_COV_BOUNDS
    return select_clip_cov(covariance, mask, columns["row_ids"], fraction=fraction, lower=lower, upper=upper, seed=seed)
