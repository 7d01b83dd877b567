"""Functions of decoded responses. They travel to the reward workers, so nothing here imports Prefect."""

from collections import Counter
from collections.abc import Sequence

from tensordict import TensorDictBase

from resources.graders import Sample
from tasks.algorithms.evaluation import summarise_samples
from tasks.rewards.final_answer import final_answer

EVERY_SOURCE = ""
"""Key of the summary over all prompts."""


def summarise_evaluation(
    samples: Sequence[Sample], rows: TensorDictBase, decode: object, *, seed: int, confidence: float = 0.95
) -> dict[str, dict[str, float]]:
    """Mean, best and majority over each prompt's samples, with intervals; for all prompts and for each source.

    `rows` holds `scores` in the order of `samples`. `lost_responses` counts those that nobody answered, which are no
    wrong answers and have no score. See `summarise_samples`.
    """
    del decode
    scores: list[float] = rows["scores"].tolist()
    by_source: dict[str, dict[int, list[tuple[float, str]]]] = {EVERY_SOURCE: {}}
    lost: Counter[str] = Counter()
    for sample, score in zip(samples, scores, strict=True):
        pair = (score, final_answer(sample.response))
        for source in (EVERY_SOURCE, sample.source):
            by_source.setdefault(source, {}).setdefault(sample.group_id, []).append(pair)
            lost[source] += sample.is_lost
    return {
        source: {"lost_responses": float(lost[source])}
        | summarise_samples(
            [[score for score, _ in pairs] for pairs in prompts.values()],
            [[answer for _, answer in pairs] for pairs in prompts.values()],
            confidence=confidence,
            seed=seed,
        )
        for source, prompts in by_source.items()
    }
