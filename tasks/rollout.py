"""The rollout step: the engines read their prompts and sample responses."""

from collections.abc import Mapping
from typing import Any

from resources.curriculum import decode_solved
from tasks.dynamic_sampling import baseline_shards, sample, sample_until_full
from tasks.host import host
from tasks.replies import call
from tasks.reward import grader_facts
from tasks.stamp import Stamp
from tasks.step import StepResult, step

ROLLOUT_COLUMNS = (
    "prompt_lengths", "response_lengths", "finish_reasons", "policy_versions", "record", "input_ids", "response_mask",
    "rollout_log_probs",
)  # fmt: skip
SCORED_COLUMNS = ("scores", "grades", "baseline_scores")
"""Added here only where scores decide what is sampled: dynamic sampling, and ReMax's baseline."""
SERVED_COLUMNS = ("token_versions",)
"""Added by rollout servers, whose weights may change between two tokens."""


@step(role="rollout", writes=(*ROLLOUT_COLUMNS, *SCORED_COLUMNS, *SERVED_COLUMNS))
def rollout(at: Stamp, policy_version: int, solved: str = "") -> StepResult:
    """Sample the responses of an iteration; adds ROLLOUT_COLUMNS.

    Nothing but numbers comes in: which prompts they are is read by the engines themselves. `solved` names the prompts
    that the curriculum leaves out. Raises NoSignalError, see `sample_until_full`.
    """
    config = host().config
    skip = sorted(decode_solved(solved))
    if config.algorithm.resolved().dynamic_sampling:
        return sample_until_full(at, policy_version, skip)
    replies = sample(at.epoch, at.start, at.count, at.iteration, policy_version, skip, batch_id=at.batch_id)
    result = replies.keep(at.batch_id, next_position=replies.agreed("next_position"))
    if config.algorithm.name != "remax":
        return result
    greedy, scored, baselines = baseline_shards(at, replies, policy_version, skip)
    extra = baselines.keep(at.batch_id)
    return StepResult(
        handle=result.handle,
        metrics={**result.metrics, **extra.metrics},
        facts={**result.facts, **grader_facts(scored.statuses, scored.spans)},
        spans=(*result.spans, *greedy.spans, *scored.spans, *extra.spans),
    )


@step(role="rollout")
def data_position(at: Stamp, saved: Mapping[str, Any]) -> StepResult:
    """Facts: `epoch`, `start` and `identity` of the data to go on from, as whoever reads the prompts says.

    `saved` is what the run's state has of it; other data begins at its beginning.
    """
    replies = call("rollout", "resume_position", dict(saved))
    return StepResult(facts={name: replies.agreed(name) for name in ("epoch", "start", "identity")})
