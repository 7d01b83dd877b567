"""Numbers of an evaluation: n samples for each prompt, and how sure the mean over the prompts is.

The prompts are the independent draws, so intervals resample prompts, not samples. A nan score (unscorable) is left out,
with the answer that it is the score of.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k of the samples, drawn without replacement, is correct.

        1 - C(n - c, k) / C(n, k)

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374: unbiased, exact for any size.

    >>> pass_at_k(num_samples=4, num_correct=2, k=2)
    0.8333333333333334

    Raises:
        ValueError: k or num_correct outside what num_samples allows.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_correct} correct; k and correct must fit into them"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_at_n(scores: Sequence[float], n: int) -> float:
    """Expected best score of n of the samples, drawn without replacement: pass@k for scores that are not 0 or 1.

    sum_i C(i - 1, n - 1) / C(N, n) * s_(i),   s_(1) <= ... <= s_(N),   N of them scorable

    Raises:
        ValueError: n below 1, or above the number of scorable samples.
    """
    known = [scores[place] for place in _scorable(scores)]
    if not 1 <= n <= len(known):
        raise ValueError(
            f"best@{n} of {len(scores)} samples, {len(known)} of them scorable; n must lie between 1 and the number of "
            "scorable samples"
        )
    ways = math.comb(len(known), n)
    return sum(math.comb(i, n - 1) / ways * score for i, score in enumerate(sorted(known)))


def majority_at_n(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Score of the answer that most samples gave; tied answers share, so the order of the samples does not matter.

    An answer's score is the mean over the samples that gave it. An answer without a score has no vote.

    >>> majority_at_n(["4", "5", "4"], [1.0, 0.0, 1.0])
    1.0

    Raises:
        ValueError: another number of scores than of answers, or none that is scorable.
    """
    if len(answers) != len(scores):
        raise ValueError(
            f"majority of {len(answers)} answers with {len(scores)} scores; give one score for each answer"
        )
    pairs = [(answers[place], scores[place]) for place in _scorable(scores)]
    if not pairs:
        raise ValueError(f"majority of {len(answers)} answers, of which none has a score; give one that is not nan")
    counts = Counter(answer for answer, _ in pairs)
    top = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == top]
    return sum(sum(score for a, score in pairs if a == winner) / top for winner in winners) / len(winners)


def _scorable(scores: Sequence[float]) -> list[int]:
    """Places of the scores that are numbers."""
    return [place for place, score in enumerate(scores) if not math.isnan(score)]


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over prompts. Efron, "Bootstrap Methods" (1979).

    Raises:
        ValueError: no value that is a number, or a confidence outside (0, 1).
    """
    known = [values[place] for place in _scorable(values)]
    if not known or not 0 < confidence < 1:
        raise ValueError(
            f"bootstrap of {len(known)} values at confidence {confidence}; need a value and 0 < confidence < 1"
        )
    sample = torch.tensor(known, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    size = len(sample)
    means = [sample[torch.randint(size, (size,), generator=generator)].mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = torch.stack(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(low), float(high)


def summarise_samples(
    scores: Sequence[Sequence[float]],
    answers: Sequence[Sequence[Hashable]] | None = None,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, float]:
    """Mean, best and majority over the samples of each prompt, averaged over prompts, with intervals.

    `scores[p]` are the scores of prompt p's samples and `answers[p]` their extracted answers. A prompt without a
    scorable sample is left out and counted under `unscorable_prompts`.

    Returns:
        `mean`, `best` and, with answers, `majority`, each with `/low` and `/high`; absent when no prompt is scorable.
    """
    measured: dict[str, list[float]] = {"mean": [], "best": [], "majority": []}
    for p, row in enumerate(scores):
        kept = _scorable(row)
        if not kept:
            continue
        values = [row[i] for i in kept]
        measured["mean"].append(sum(values) / len(values))
        measured["best"].append(max(values))
        if answers is not None:
            measured["majority"].append(majority_at_n([answers[p][i] for i in kept], values))
    summary = {"unscorable_prompts": float(len(scores) - len(measured["mean"]))}
    for name, per_prompt in measured.items():
        if per_prompt:
            low, high = bootstrap_interval(per_prompt, confidence=confidence, seed=seed)
            summary |= {name: sum(per_prompt) / len(per_prompt), f"{name}/low": low, f"{name}/high": high}
    return summary
