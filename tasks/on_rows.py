"""Functions of ragged rows around the pure algorithms. They travel to workers, so nothing here imports Prefect."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from resources.batch import (
    BRANCH_STRIDE,
    COLUMNS,
    first_true,
    make_shard,
    rollout_ids_of,
    row_lengths,
    to_padded,
    to_ragged,
)
from resources.engines.base import FinishReason
from resources.micro_batches import Siblings
from tasks.algorithms.advantage_step import score_mean
from tasks.algorithms.diagnostics import COUNT, mean_metric
from tasks.algorithms.masking import zero_masked
from tasks.algorithms.token_rewards import overlong_penalty

Estimator = Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]


def padded_columns(rows: TensorDictBase, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Token columns as [B, T], row columns as [B]; byte columns stay behind."""
    wanted = rows.keys() if names is None else [*names, "row_ids"]
    padded: dict[str, Tensor] = {}
    for name in wanted:
        column = rows.get(name)
        if not column.is_nested:
            padded[name] = column
        elif name not in COLUMNS or COLUMNS[name].kind == "token":
            padded[name] = to_padded(column)
    return padded


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """What happens to scores before the estimator and to rows after it."""

    overlong: tuple[int, int, float] | None = None
    """DAPO's penalty: (max_length, buffer, factor)."""
    policy_version: int = 0
    """Of the policy that is about to be updated."""
    max_staleness: int | None = None
    """Rows sampled more versions ago are not trained on."""
    is_rescaled: bool = False
    """The scores were normalised or clipped after the graders' mean was told."""
    is_refilled: bool = False
    """Groups with a lost response were left out, and counted, when they were sampled."""

    @property
    def plain_name(self) -> str:
        """What the mean of the scores, as they come in, is called."""
        return "reward/shaped_score_mean" if self.is_rescaled else "reward/score_mean"


def advantages_of_rows(
    rows: TensorDictBase, *, estimator: Estimator, shaping: Shaping | None = None
) -> tuple[dict[str, float], TensorDict]:
    """Run the estimator on the whole rollout batch; returns metrics as sums and the new ragged columns.

    Rows are put in the order of their ids first, so that sums are the same bits whichever worker, pool or
    number of ranks brought them.
    """
    order = torch.argsort(rows["row_ids"])
    padded = {name: column[order] for name, column in padded_columns(rows).items()}
    lengths = row_lengths(rows.get("response_mask"))[order]
    if bool((padded["row_ids"] >= BRANCH_STRIDE).any()):
        padded["rollout_ids"] = rollout_ids_of(padded["row_ids"])
    if "baseline_scores" in padded:
        padded = _without_lost_baselines(padded)
    dropped: dict[str, Tensor] = {}
    if "finish_reasons" in padded and not (shaping is not None and shaping.is_refilled):
        padded, dropped = _without_lost_groups(padded)
    if shaping is None:
        columns, metrics = estimator(padded)
    else:
        padded, penalty = _penalised(padded, shaping)
        columns, metrics = estimator(padded)
        columns, age = _fresh(columns, padded, shaping)
        metrics = _told_apart(metrics, shaping) | penalty | age
    metrics = {**metrics, **dropped}
    shard = {"row_ids": padded["row_ids"], **{name: to_ragged(column, lengths) for name, column in columns.items()}}
    return {name: float(value) for name, value in metrics.items()}, make_shard(shard)


def _told_apart(metrics: Mapping[str, Tensor], shaping: Shaping) -> dict[str, Tensor]:
    """`reward/score_mean` is of the graders' scores: what the estimator saw has a name of its own where it differs."""
    seen = "reward/penalised_score_mean" if shaping.overlong is not None else shaping.plain_name
    names = {"reward/score_mean": seen, "reward/score_mean" + COUNT: seen + COUNT}
    return {names.get(name, name): value for name, value in metrics.items()}


def _without_lost_baselines(padded: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row whose greedy baseline could not be scored has nothing to be compared with: it is unscorable."""
    is_lost = padded["baseline_scores"].isnan()
    scores = padded["scores"].masked_fill(is_lost, torch.nan)
    return {**padded, "scores": scores, "baseline_scores": padded["baseline_scores"].masked_fill(is_lost, 0.0)}


def _without_lost_groups(padded: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A response that no engine could finish in time takes its group along: a baseline of the rest would be biased."""
    is_lost = (padded["finish_reasons"] == FinishReason.ABORT) & ~padded["response_mask"].any(dim=1)
    lost_groups = padded["group_ids"][is_lost].unique()
    scores = padded["scores"].masked_fill(torch.isin(padded["group_ids"], lost_groups), torch.nan)
    return {**padded, "scores": scores}, {"rollout/dropped_groups": torch.tensor(float(len(lost_groups)))}


def _penalised(padded: dict[str, Tensor], shaping: Shaping) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if shaping.overlong is None:
        return padded, {}
    max_length, buffer, factor = shaping.overlong
    penalty = overlong_penalty(padded["response_lengths"], max_length=max_length, buffer=buffer, factor=factor)
    every_row = torch.ones_like(penalty, dtype=torch.bool)
    metrics = mean_metric("reward/overlong_penalty", penalty, every_row)
    metrics |= score_mean(shaping.plain_name, padded["scores"], padded.get("rollout_ids"))
    return {**padded, "scores": padded["scores"] + penalty.to(padded["scores"].dtype)}, metrics


def _fresh(
    columns: dict[str, Tensor], padded: Mapping[str, Tensor], shaping: Shaping
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Leave rows that are too old out of the update; how old the rows are becomes a metric."""
    age = (shaping.policy_version - padded["policy_versions"]).float()
    every_row = torch.ones_like(age, dtype=torch.bool)
    metrics = mean_metric("rollout/staleness", age, every_row)
    if age.numel():
        metrics["rollout/staleness/max"] = age.max()
    if shaping.max_staleness is None:
        return columns, metrics
    is_fresh = (age <= shaping.max_staleness)[:, None]
    metrics["rollout/stale_rows"] = (~is_fresh).sum().float()
    kept = {
        "train_mask": columns["train_mask"] & is_fresh,
        "advantages": zero_masked(columns["advantages"], is_fresh.expand_as(columns["advantages"])),
    }
    return {**columns, **kept}, metrics


def update_facts(rows: TensorDictBase) -> tuple[list[int], list[int], list[int], Siblings]:
    """(row ids, lengths in tokens, trained tokens, siblings), ascending by row id: what an update plan is made from."""
    order = torch.argsort(rows["row_ids"])
    mask = rows.get("train_mask")
    lengths = row_lengths(mask)
    padded = to_padded(mask)[order]
    siblings = Siblings(groups=rows["group_ids"][order].tolist(), prompts=first_true(padded).tolist())
    return rows["row_ids"][order].tolist(), lengths[order].tolist(), padded.sum(dim=1).tolist(), siblings
