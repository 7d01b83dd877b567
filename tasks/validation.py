"""The validation step: held-out prompts sampled and scored with the graders' plain scores."""

from resources.rows import Rows
from tasks.algorithms.diagnostics import finish_metrics
from tasks.host import host
from tasks.replies import Replies, call
from tasks.reward import score_rows
from tasks.stamp import Stamp
from tasks.step import StepResult, step

GREEDY, SAMPLED = "validation/accuracy", "validation/sampled_accuracy"
"""Mean score of the greedy response, and of sampled ones."""


@step(role="rollout")
def validation(at: Stamp, policy_version: int) -> StepResult:
    """Mean scores of the held-out prompts under the engines' weights."""
    settings = host().config.validation
    kinds = {SAMPLED: False, **({GREEDY: True} if settings.greedy else {})}
    metrics: dict[str, float] = {}
    spans = []
    for name, is_greedy in kinds.items():
        count, samples = settings.num_prompts, settings.samples_per_prompt
        sampled = call("rollout", "evaluate", count, samples, is_greedy, is_bulk=True)
        batch_id = f"{at.batch_id}-{policy_version}-{name}"
        scored = score_rows(rows_of(sampled), batch_id, is_validation=True)
        metrics[name] = finish_metrics(scored.sums)["reward/score_mean"]
        spans += [*sampled.spans, *scored.spans]
    return StepResult(metrics=metrics, spans=tuple(spans))


def rows_of(replies: Replies) -> Rows:
    """Everything the workers returned, by reference, ascending by row id."""
    return Rows(replies.shards, sorted(row for shard in replies.shards for row in shard.row_ids))
