"""The validation step: held-out prompts sampled and scored with the graders' plain scores.

Of n samples a prompt come the mean, the best and the majority's score, each with a bootstrap interval over the
prompts, for all prompts and for each source.
"""

from collections.abc import Mapping
from functools import partial

from resources.rows import Rows
from resources.seeding import stream_seed
from tasks.dynamic_sampling import rows_of
from tasks.environment import environment_options
from tasks.host import host
from tasks.on_samples import EVERY_SOURCE, summarise_evaluation
from tasks.replies import Replies, call
from tasks.reward import score_rows
from tasks.stamp import Stamp
from tasks.step import StepResult, step

GREEDY, SAMPLED = "accuracy", "sampled_accuracy"
"""Mean score of the greedy response, and of sampled ones."""
INTERVALS = ("", "/low", "/high")


@step(role="rollout")
def validation(at: Stamp, policy_version: int) -> StepResult:
    """Mean scores of the held-out prompts under the engines' weights, and what n samples make of them.

    Metrics under `validation/`: `accuracy` (greedy), `sampled_accuracy`, with n > 1 `best_at_n` and `majority_at_n`;
    each with `/low` and `/high`, and once more under `validation/source/NAME/` where there are several sources.
    Responses that nobody answered are left out and counted, as are episodes of an agent that failed.
    """
    settings = host().config.validation
    kinds = {SAMPLED: settings.samples_per_prompt, **({GREEDY: 1} if settings.greedy else {})}
    metrics: dict[str, float] = {}
    spans = []
    for name, num_samples in kinds.items():
        sampled = call(
            "rollout",
            "evaluate",
            settings.num_prompts,
            settings.samples_per_prompt,
            name == GREEDY,
            **environment_options(),
            is_bulk=True,
        )
        rows, batch_id = rows_of(sampled), f"{at.batch_id}-{policy_version}-{name}"
        scored = score_rows(rows, batch_id, is_validation=True)
        summary = _summarise(Rows([*rows.shards, *scored.shards], rows.row_ids))
        metrics |= validation_metrics(summary.statuses[0]["answer"], name, num_samples)
        if failed := sampled.sums.get("rollout/failed_episodes"):
            metrics[f"validation/{name}/failed_episodes"] = failed
        spans += [*sampled.spans, *scored.spans, *summary.spans]
    return StepResult(metrics=metrics, spans=tuple(spans))


def validation_metrics(told: Mapping[str, Mapping[str, float]], name: str, num_samples: int) -> dict[str, float]:
    """Names of the metrics in place of the summary's own words.

    >>> validation_metrics({"": {"mean": 0.5, "best": 1.0, "unscorable_prompts": 0.0}}, "sampled_accuracy", 4)
    {'validation/sampled_accuracy': 0.5, 'validation/best_at_4': 1.0}
    """
    names = {"mean": name}
    if num_samples > 1:
        names |= {"best": f"best_at_{num_samples}", "majority": f"majority_at_{num_samples}"}
    sources = told if len(told) > 2 else [EVERY_SOURCE]  # a lone source is the whole
    metrics: dict[str, float] = {}
    for source in sources:
        prefix = f"validation/source/{source}" if source else "validation"
        for word, metric in names.items():
            for end in INTERVALS:
                if word + end in told[source]:
                    metrics[f"{prefix}/{metric}{end}"] = told[source][word + end]
        if told[source].get("unscorable_prompts"):
            metrics[f"{prefix}/unscorable_prompts"] = told[source]["unscorable_prompts"]
        if told[source].get("lost_responses"):
            metrics[f"{prefix}/{name}/lost_responses"] = told[source]["lost_responses"]
    return metrics


def _summarise(rows: Rows) -> Replies:
    config = host().config
    fn = partial(summarise_evaluation, seed=stream_seed(config.seed, "bootstrap"))
    return call("reward", "report", fn, rows)
