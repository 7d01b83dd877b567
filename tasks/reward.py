"""The reward step: waits for the scores that streaming has not brought yet, and joins them by row id.

Its span is what grading still cost after the rollout; what was hidden under the rollout is told as `hidden_seconds`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from resources.curriculum import solved_in
from resources.reward_scores import Moments
from resources.rows import Rows, ShardRef
from resources.splitting import split_sizes
from resources.store import BatchHandle
from resources.telemetry.probes import GraderLatency
from tasks.host import host
from tasks.replies import Replies, call
from tasks.stamp import Stamp
from tasks.step import StepResult, step

REWARD_COLUMNS = ("record", "input_ids", "response_mask", "finish_reasons", "response_lengths")
"""What a reward worker reads."""
SHARE_OF_DEADLINE = 0.9
"""Of a call's deadline; what is not graded by then is unscorable, before the call itself counts as lost."""


class NothingScoredError(RuntimeError):
    """Not one response of a batch could be scored; training on it would move nothing."""


@step(role="reward", reads=REWARD_COLUMNS, writes=("scores", "grades"))
def reward(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `scores`, nan where a response could not be scored, and `grades`, what each grader gave.

    With dynamic sampling both are there already, since the rollout could not do without.

    Facts: `graders` and `hidden_seconds` (see telemetry/facts.py), `causes` of unscorable responses as sentences, and
    with `reward.normalise` the `state` that a checkpoint keeps and `restore_reward_state` gives back.
    """
    if host().config.algorithm.resolved().dynamic_sampling:
        return StepResult(handle=batch)
    replies = score_rows(host().read(batch, columns=REWARD_COLUMNS), batch.batch_id)
    facts = reward_facts(replies.statuses)
    moments = _moments(replies.statuses)
    if moments.count == 0:
        causes = "; ".join(facts["causes"]) or "no cause was told"
        raise NothingScoredError(f"none of {facts['rows']} responses could be scored: {causes}")
    metrics = {"reward/score_std": moments.std}
    if host().config.reward.normalise:
        plain, replies = replies, call("reward", "normalise", batch.batch_id, moments.to_json(), is_bulk=True)
        facts["state"] = replies.statuses[0]["state"]
        replies = replace(
            replies, statuses=[_joined(*pair) for pair in zip(plain.statuses, replies.statuses, strict=True)]
        )
    result = replies.keep(at.batch_id, **facts)
    return replace(result, metrics={**result.metrics, **metrics})


def score_rows(rows: Rows, batch_id: str, *, is_validation: bool = False) -> Replies:
    """Let the reward workers score these rows, which hold REWARD_COLUMNS; reward models go first."""
    deadline = SHARE_OF_DEADLINE * host().config.recovery.call_deadline_seconds
    return call("reward", "score", batch_id, rows, model_scores(rows), is_validation, deadline, is_bulk=True)


def model_scores(rows: Rows) -> dict[str, Rows] | None:
    """Grader of kind `model` -> the scores its worker group gave, by reference."""
    names = [grader.name for grader in host().config.reward.graders if grader.kind == "model"]
    found: dict[str, Rows] = {}
    for name in names:
        replies = call(f"reward_model.{name}", "score", rows, is_bulk=True)
        start, shards = 0, []
        for size, data in zip(split_sizes(len(rows.row_ids), len(replies.data)), replies.data, strict=True):
            shards.append(ShardRef(data, rows.row_ids[start : start + size], ("row_ids", "scores")))
            start += size
        found[name] = Rows(shards, rows.row_ids)
    return found or None


def reward_facts(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Latencies merged over ranks, the time hidden under the rollout, rows and causes."""
    merged: dict[str, GraderLatency] = {}
    for status in statuses:
        for grader in status["graders"]:
            name = grader["name"]
            latency = merged.setdefault(name, GraderLatency(name, grader["kind"], grader["workers"] * len(statuses)))
            for index, seconds in enumerate(sorted(grader["seconds"], reverse=True)):
                latency.add(seconds, timed_out=index < grader["timeouts"])
    return {
        "graders": [latency.facts() for latency in merged.values()],
        "hidden_seconds": max(status["hidden_seconds"] for status in statuses),
        "rows": sum(status["spans"]["rows"] for status in statuses),
        "causes": [cause for status in statuses for cause in status["causes"]][:8],
        **_solved(statuses),
    }


def _solved(statuses: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """With a curriculum, the prompts whose responses were all right; see `resources/curriculum.py`."""
    data = host().config.data
    if data.curriculum == "none":
        return {}
    lowest = {key: score for status in statuses for key, score in status["groups"].items()}
    return {"solved": solved_in(lowest, data.solved_score)}


def _moments(statuses: Sequence[Mapping[str, Any]]) -> Moments:
    total = Moments()
    for status in statuses:
        total = total + Moments.from_json(status["moments"])
    return total


def _joined(scored: Mapping[str, Any], normalised: Mapping[str, Any]) -> dict[str, Any]:
    return {**normalised, "metrics": scored["metrics"]}
