"""Rollouts that are scored while they are made: refilling groups without signal, and greedy baselines.

Both need scores before the batch is complete, so the rollout step itself asks the reward workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from resources.batch import make_shard
from resources.reward_stream import RewardStream
from resources.rows import Rows, ShardRef
from resources.telemetry.spans import RankSpan
from tasks.algorithms.diagnostics import finish_metrics
from tasks.algorithms.group_advantages import rows_with_signal
from tasks.environment import environment_options
from tasks.host import host
from tasks.replies import Replies, add_sums, call
from tasks.reward import reward_facts, score_rows
from tasks.stamp import Stamp
from tasks.step import StepResult

LEAST_YIELD = 0.25
"""A refill asks for the missing groups over the share that had signal so far, taken as at least this."""


class NoSignalError(RuntimeError):
    """Not one group of an iteration had scores that differ, however often it was refilled."""


@dataclass(kw_only=True)
class _Filling:
    """What dynamic sampling has so far."""

    groups: list[int] = field(default_factory=list)
    """With signal, in the order of the data."""
    num_sampled: int = 0
    """Groups, with signal or without."""
    num_dropped: int = 0
    """Groups of them with a response that nobody answered."""
    shards: list[ShardRef] = field(default_factory=list)
    statuses: list[Mapping[str, Any]] = field(default_factory=list)
    scored: list[Mapping[str, Any]] = field(default_factory=list)
    spans: tuple[RankSpan, ...] = ()
    group_of: dict[int, int] = field(default_factory=dict)
    """Row id -> group id, of rows with signal."""


def sample_until_full(at: Stamp, policy_version: int, skip: Sequence[str]) -> StepResult:
    """Sample until `at.count` groups have signal, in at most `dynamic_sampling.max_rounds` refills.

    The batch holds the first `at.count` groups with signal, in the order of the data, with their `scores`; it is
    smaller when the refills are used up. Facts and metrics are of everything that was sampled.

    Raises NoSignalError when no group had any.
    """
    config = host().config
    filling = _Filling()
    epoch, start, position = at.epoch, at.start, {}
    rounds = 0
    while len(filling.groups) < at.count and rounds <= config.algorithm.dynamic_sampling.max_rounds:
        count = at.count if not rounds else _refill(at.count, len(filling.groups), filling.num_sampled)
        sampled = sample(epoch, start, count, at.iteration, policy_version, skip)
        _take(filling, sampled, score_rows(rows_of(sampled), f"{at.batch_id}-round-{rounds}"))
        position = sampled.agreed("next_position")
        epoch, start = int(position["epoch"]), int(position["start"])
        rounds += 1
    if not filling.groups:
        raise NoSignalError(_no_signal(filling, rounds))
    return _result(at, filling, position, rounds)


def sample(
    epoch: int,
    start: int,
    count: int,
    iteration: int,
    policy_version: int,
    skip: Sequence[str],
    *,
    greedy: bool = False,
    batch_id: str | None = None,
) -> Replies:
    """Let the engines sample `count` prompts from a position on.

    `batch_id`: responses are graded under that name as they finish, while others are still sampled.

    Raises ValueError when the engines that answered did not take all prompts: the others' rows were never here.
    """
    replies = call(
        "rollout",
        "sample",
        epoch,
        start,
        count,
        host().config.rollout.group_size,
        iteration,
        policy_version,
        skip=list(skip),
        greedy=greedy,
        stream=_stream(batch_id),
        **environment_options(),
        is_bulk=True,
    )
    taken = sum(status["num_prompts"] for status in replies.statuses)
    if taken != count:
        raise ValueError(
            f"{count} prompts were to be sampled and the engines that answered took {taken}; as many ranks must answer "
            "as there are engines, so give the workers the tensor_parallel of their role"
        )
    return replies


def _stream(batch_id: str | None) -> RewardStream | None:
    """Where finished responses go; None where rewards are not streamed, or share the engines' own process."""
    config = host().config
    placed = config.roles.get("reward")
    is_apart = placed is not None and placed.colocate != "fused"
    if batch_id is None or not config.reward.stream or not is_apart:
        return None
    return RewardStream(host().group("reward"), batch_id)


def rows_of(replies: Replies) -> Rows:
    """Everything the workers returned, by reference, ascending by row id."""
    return Rows(replies.shards, sorted(row for shard in replies.shards for row in shard.row_ids))


def baseline_shards(
    at: Stamp, sampled: Replies, policy_version: int, skip: Sequence[str]
) -> tuple[Replies, Replies, Replies]:
    """ReMax: the greedy response to each prompt, its score, and that as `baseline_scores` for the rows of `sampled`.

    nan where that is unscorable, lost, or of an episode that failed and left no row.
    """
    greedy = sample(at.epoch, at.start, at.count, at.iteration, policy_version, skip, greedy=True)
    scored = score_rows(rows_of(greedy), f"{at.batch_id}-greedy")
    scores = rows_of(scored).load(("scores", "group_ids"))
    by_group = dict(zip(scores["group_ids"].tolist(), scores["scores"].tolist(), strict=True))
    baselines = call("advantage", "apply", partial(_baselines, by_group=by_group), rows_of(sampled), is_bulk=True)
    return greedy, scored, baselines


def _baselines(rows: TensorDictBase, *, by_group: Mapping[int, float]) -> tuple[dict[str, float], TensorDict]:
    groups = rows["group_ids"]
    scores = torch.tensor([by_group.get(group, math.nan) for group in groups.tolist()], dtype=torch.float32)
    known = scores[~scores.isnan()]
    metrics = {
        "rollout/greedy_score_mean": float(known.sum()),
        "rollout/greedy_score_mean/count": float(known.numel()),
        "rollout/missing_baselines": float(len(groups[scores.isnan()].unique())),
    }
    return metrics, make_shard({"row_ids": rows["row_ids"].clone(), "baseline_scores": scores})


def _refill(wanted: int, found: int, sampled: int) -> int:
    share = max(found / sampled, LEAST_YIELD)
    return max(1, min(wanted, math.ceil((wanted - found) / share)))


def _take(filling: _Filling, sampled: Replies, scored: Replies) -> None:
    scores = rows_of(scored).load(("scores", "group_ids"))
    # A group that the update would drop has no signal, whatever its other responses scored.
    lost = {group for status in scored.statuses for group in status["lost_groups"]}
    is_lost = torch.isin(scores["group_ids"], torch.tensor(sorted(lost), dtype=torch.int64))
    kept = rows_with_signal(scores["scores"].masked_fill(is_lost, torch.nan), scores["group_ids"])
    filling.num_sampled += len(set(scores["group_ids"].tolist()))
    filling.num_dropped += len(lost)
    filling.groups += sorted(set(scores["group_ids"][kept].tolist()))
    filling.group_of |= dict(zip(scores["row_ids"][kept].tolist(), scores["group_ids"][kept].tolist(), strict=True))
    filling.shards += [*sampled.shards, *scored.shards]
    filling.statuses += sampled.statuses
    filling.scored += scored.statuses
    filling.spans += (*sampled.spans, *scored.spans)


def _result(at: Stamp, filling: _Filling, position: Mapping[str, Any], rounds: int) -> StepResult:
    chosen = set(filling.groups[: at.count])
    rows = {row for row, group in filling.group_of.items() if group in chosen}
    parts = [
        ShardRef(shard.data, tuple(row for row in shard.row_ids if row in rows), shard.columns)
        for shard in filling.shards
    ]
    metrics = finish_metrics(add_sums(status.get("metrics", {}) for status in (*filling.statuses, *filling.scored)))
    # The advantage step tells the mean of the rows that are trained on; this one is of all that were sampled.
    if "reward/score_mean" in metrics:
        metrics["rollout/sampled_score_mean"] = metrics.pop("reward/score_mean")
    metrics |= {
        "rollout/refill_rounds": float(rounds - 1),
        "rollout/groups_sampled": float(filling.num_sampled),
        "rollout/groups_kept": float(len(chosen)),
        "rollout/dropped_groups": float(filling.num_dropped),
    }
    facts = {"next_position": position, **reward_facts(filling.scored, filling.spans)}
    handle = host().add(at.batch_id, [part for part in parts if part.row_ids])
    return StepResult(handle=handle, metrics=metrics, facts=facts, spans=filling.spans)


def _no_signal(filling: _Filling, rounds: int) -> str:
    scored = finish_metrics(add_sums(status.get("metrics", {}) for status in filling.scored))
    mean = scored.get("reward/score_mean")
    said = "every response was unscorable" if mean is None else f"the mean score was {mean:.3g}"
    if filling.num_dropped:
        said += f"; {filling.num_dropped} groups were dropped for a response that no engine answered"
    return (
        f"none of {filling.num_sampled} groups in {rounds} rounds had scores that differ ({said}), so there is nothing "
        "to learn from: the task is solved, too hard for this policy, or the graders see no difference. Change the "
        "data or the graders, raise rollout.group_size or algorithm.dynamic_sampling.max_rounds, or turn "
        "algorithm.dynamic_sampling.enabled off"
    )
