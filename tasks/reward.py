"""The reward step: waits for the scores that streaming has not brought yet, and joins them by row id.

Its span is what grading still cost after the rollout; what was hidden under the rollout is told as `hidden_seconds`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from resources.curriculum import solved_in
from resources.reward_scores import Moments
from resources.rows import Rows, ShardRef
from resources.splitting import split_sizes
from resources.store import BatchHandle
from resources.telemetry.probes import GraderLatency
from resources.telemetry.spans import RankSpan
from tasks.host import host
from tasks.replies import Replies, call
from tasks.stamp import Stamp
from tasks.step import StepResult, step

REWARD_COLUMNS = ("record", "input_ids", "response_mask", "finish_reasons", "response_lengths")
"""What a reward worker reads."""
MODEL_DUTY = "reward_model."
"""Before the name of a grader of kind `model`: the duty of its worker group."""
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
    facts = reward_facts(replies.statuses, replies.spans)
    moments = _moments(replies.statuses)
    if moments.count == 0:
        causes = "; ".join(facts["causes"]) or "no cause was told"
        raise NothingScoredError(f"none of {facts['rows']} responses could be scored: {causes}")
    metrics = {"reward/score_std": moments.std}
    if host().config.reward.normalise:
        plain, replies = replies, call("reward", "normalise", batch.batch_id, moments.to_json(), is_bulk=True)
        facts["state"] = replies.statuses[0]["state"]
        replies = replace(
            replies,
            statuses=[_joined(*pair) for pair in zip(plain.statuses, replies.statuses, strict=True)],
            spans=(*plain.spans, *replies.spans),
        )
    result = replies.keep(at.batch_id, **facts)
    return replace(result, metrics={**result.metrics, **metrics})


def score_rows(rows: Rows, batch_id: str, *, is_validation: bool = False) -> Replies:
    """Let the reward workers score these rows, which hold REWARD_COLUMNS; reward models go first.

    The spans are of both: a model's seconds are as much the step's as the graders'.
    """
    deadline = SHARE_OF_DEADLINE * host().config.recovery.call_deadline_seconds
    models, spans = model_scores(rows)
    replies = call("reward", "score", batch_id, rows, models, is_validation, deadline, is_bulk=True)
    return replace(replies, spans=(*spans, *replies.spans))


def model_scores(rows: Rows) -> tuple[dict[str, Rows] | None, tuple[RankSpan, ...]]:
    """Grader of kind `model` -> the scores its worker group gave, by reference; and the spans of those ranks."""
    names = [grader.name for grader in host().config.reward.graders if grader.kind == "model"]
    found: dict[str, Rows] = {}
    spans: list[RankSpan] = []
    for name in names:
        replies = call(MODEL_DUTY + name, "score", rows, is_bulk=True)
        spans += replies.spans
        start, shards = 0, []
        for size, data in zip(split_sizes(len(rows.row_ids), len(replies.data)), replies.data, strict=True):
            shards.append(ShardRef(data, rows.row_ids[start : start + size], ("row_ids", "scores")))
            start += size
        found[name] = Rows(shards, rows.row_ids)
    return found or None, tuple(spans)


def grader_facts(statuses: Sequence[Mapping[str, Any]], spans: Iterable[RankSpan]) -> dict[str, Any]:
    """Latencies merged over ranks, a reward model's from its ranks' spans; and the time hidden under the rollout.

    `statuses` may be of several calls: the ranks, and so the calls at once, are as many as they were in each.
    """
    merged: dict[str, GraderLatency] = {}
    num_ranks = len({status["spans"]["rank"] for status in statuses})
    for status in statuses:
        for grader in status["graders"]:
            name = grader["name"]
            latency = merged.setdefault(name, GraderLatency(name, grader["kind"], grader["workers"] * num_ranks))
            for index, seconds in enumerate(sorted(grader["seconds"], reverse=True)):
                latency.add(seconds, timed_out=index < grader["timeouts"])
    models: dict[str, list[RankSpan]] = {}
    for span in spans:
        if span.duty.startswith(MODEL_DUTY):
            models.setdefault(span.duty.removeprefix(MODEL_DUTY), []).append(span)
    for name, ranks in models.items():
        merged[name] = GraderLatency(name, "model", len({span.rank for span in ranks}))
        for span in ranks:
            merged[name].add(span.execute_seconds)
    return {
        "graders": [latency.facts() for latency in merged.values()],
        "hidden_seconds": max(status["hidden_seconds"] for status in statuses),
    }


def reward_facts(statuses: Sequence[Mapping[str, Any]], spans: Iterable[RankSpan]) -> dict[str, Any]:
    """`grader_facts`, rows and causes."""
    return {
        **grader_facts(statuses, spans),
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
