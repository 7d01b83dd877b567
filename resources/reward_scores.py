"""From the graders' answers to one number a response: weights, truncation, running normalisation, clipping.

Pure arithmetic on plain numbers. Nothing depends on the order in which answers arrived.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.graders import CAUSES, Cause, Grader, Sample

NAN = math.nan
LOST = "lost: no engine answered, or the episode was lost in a later turn"
"""Said of a response that nobody answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What one grader finally said of one response."""

    score: float
    """nan when it could not be scored."""
    cause: Cause | None = None
    text: str = ""
    seconds: tuple[float, ...] = ()
    """Of each call made for it; a group-wise call counts for the group's first response."""
    timeouts: int = 0


def combine(
    sample: Sample, grades: Mapping[str, Grade], graders: Sequence[Grader], truncated_score: float | None = None
) -> float:
    """Weighted sum over the graders of the sample's source; nan as soon as one of them gave no score, or it was lost.

    A response cut at the length limit takes `truncated_score` instead, when there is one: that it has no answer says
    nothing about its format.
    """
    if sample.is_lost:
        return NAN
    if truncated_score is not None and sample.is_truncated:
        return truncated_score
    parts = [grader.weight * grades[grader.name].score for grader in graders if grader.scores_source(sample.source)]
    return math.fsum(parts) if all(math.isfinite(part) for part in parts) else NAN


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations; adds up over ranks and batches.

    >>> Moments.of([1.0, 3.0, float("nan")]).std
    1.0
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, scores: Iterable[float]) -> "Moments":
        """Of the scores that are not nan."""
        known = [score for score in scores if not math.isnan(score)]
        if not known:
            return cls()
        mean = math.fsum(known) / len(known)
        return cls(count=len(known), mean=mean, squares=math.fsum((score - mean) ** 2 for score in known))

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if count == 0:
            return self
        shift = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + shift * other.count / count,
            squares=self.squares + other.squares + shift * shift * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for fewer than two scores."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 0.0

    def to_json(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_json(cls, record: Mapping[str, float]) -> "Moments":
        return cls(count=int(record["count"]), mean=record["mean"], squares=record["squares"])


def shape_scores(scores: Sequence[float], scale: float | None, clip: float | None) -> list[float]:
    """Divide by the running standard deviation (none or 0 leaves them), then clip to [-clip, clip]; nan stays nan."""
    divided = [score / scale if scale else score for score in scores]
    if clip is None:
        return divided
    return [score if math.isnan(score) else max(-clip, min(clip, score)) for score in divided]


@dataclass(kw_only=True)
class Tally:
    """Sums and counts over the responses of a batch, and the latencies of its graders."""

    metrics: dict[str, float] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)
    """Sentence -> responses it held for."""
    latencies: dict[str, tuple[list[float], int]] = field(default_factory=dict)
    """Grader -> (seconds of every call, timeouts)."""

    def add_mean(self, name: str, value: float, count: float = 1.0) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.metrics[f"{name}/count"] = self.metrics.get(f"{name}/count", 0.0) + count

    def add_row(self, sample: Sample, score: float, grades: Mapping[str, Grade], *, is_truncation_scored: bool) -> None:
        """One response. Its unscorable graders count by cause; the first cause by name of grader counts for the row."""
        if sample.is_lost:
            self._add_unscorable("lost")
            self.causes[LOST] = self.causes.get(LOST, 0) + 1
            return
        self.add_mean("reward/truncated_fraction", float(sample.is_truncated))
        if not math.isnan(score):
            self.add_mean("reward/score_mean", score)
            self.add_mean(f"reward/source/{sample.source}/score_mean", score)
            name = "reward/score/max"
            self.metrics[name] = max(self.metrics.get(name, -math.inf), score)
        for name, grade in sorted(grades.items()):
            seconds, timeouts = self.latencies.setdefault(name, ([], 0))
            self.latencies[name] = (seconds + list(grade.seconds), timeouts + grade.timeouts)
            if grade.cause is None:
                self.add_mean(f"reward/grader/{name}/score_mean", grade.score)
            else:
                self.causes[grade.text] = self.causes.get(grade.text, 0) + 1
        failed = [grade.cause for _, grade in sorted(grades.items()) if grade.cause is not None]
        if failed and not is_truncation_scored:
            self._add_unscorable(failed[0])

    def _add_unscorable(self, cause: str) -> None:
        for name in ("reward/unscorable", f"reward/unscorable_{cause}"):
            self.metrics[name] += 1.0

    @classmethod
    def empty(cls) -> "Tally":
        names = ["reward/unscorable", *(f"reward/unscorable_{cause}" for cause in (*CAUSES, "lost"))]
        return cls(metrics=dict.fromkeys(names, 0.0))

    def first_causes(self, limit: int = 8) -> list[str]:
        """The most frequent failures, as sentences."""
        ordered = sorted(self.causes.items(), key=lambda item: (-item[1], item[0]))
        return [f"{text} ({count} responses)" if count > 1 else text for text, count in ordered[:limit]]

    def graders(self, graders: Sequence[Grader], workers: Mapping[str, int]) -> list[dict[str, Any]]:
        """Raw latencies by grader, to be merged over ranks."""
        return [
            {
                "name": grader.name,
                "kind": grader.kind,
                "workers": workers.get(grader.name, 1),
                "seconds": self.latencies[grader.name][0],
                "timeouts": self.latencies[grader.name][1],
            }
            for grader in graders
            if grader.name in self.latencies
        ]
