"""The verdict: one role or the controller, its cause, the evidence and the change; or "balanced".

Pure. Made for one iteration from its candidates, or for a run from those of its iterations summed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from resources.telemetry.advice import change_for, evidence_for
from resources.telemetry.causes import (
    DEFAULT_THRESHOLDS,
    GRADER_CAUSES,
    STEP_WIDE_CAUSES,
    Candidate,
    Cause,
    Thresholds,
    is_rare,
)
from resources.telemetry.detectors import find_candidates
from resources.telemetry.timeline import Timeline

BALANCED_ROLE = "none"
_SUMMED = frozenset({"calls", "slow_calls", "timeouts", "preemptions"})
_HIGHEST = frozenset({"max_seconds", "longest_response", "kv_cache_use_max"})
_LISTED_FRACTION = 0.03
"""Other causes are listed down to this share of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which role holds the step back and what to change.

    `role` is a role, "controller", or "none" when balanced. Gains are of the step without the cause's excess.
    """

    role: str
    cause: Cause
    gain_seconds: float
    gain_fraction: float
    step_seconds: float
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    others: tuple[Candidate, ...] = ()
    """What else would have shortened the step, the dearest first."""
    refused: tuple[str, ...] = ()
    """Changes that the run's config would not take: they are not recommended."""
    num_steps: int = 1
    """Iterations that seconds are means of."""

    @property
    def is_balanced(self) -> bool:
        return self.cause is Cause.BALANCED

    @property
    def evidence_text(self) -> str:
        return evidence_for(self.role, self.cause, self.evidence)

    @property
    def change(self) -> str:
        return change_for(self.role, self.cause, self.evidence, self.refused)

    @property
    def cause_text(self) -> str:
        """The cause beside its role: of the rollout, `long tail` says enough."""
        return str(self.cause).removeprefix(f"{self.role} ")

    @property
    def line(self) -> str:
        """One line for the console."""
        if self.is_balanced:
            return f"balanced: {self.evidence_text}"
        return (
            f"{self.role}: {self.cause_text}, up to -{100 * self.gain_fraction:.0f} % of the step"
            f" ({self.gain_seconds:.2f} of {self.step_seconds:.2f} s{self.means_text}): {self.evidence_text}"
        )

    @property
    def means_text(self) -> str:
        """What the seconds are, of more than one step."""
        return f", means of {self.num_steps} iterations" if self.num_steps > 1 else ""

    def to_json(self) -> dict[str, object]:
        """For metrics and `--json`."""
        return {
            "role": self.role,
            "cause": str(self.cause),
            "gain_seconds": round(self.gain_seconds, 6),
            "gain_fraction": round(self.gain_fraction, 6),
            "evidence": dict(self.evidence),
            "evidence_text": self.evidence_text,
            "change": self.change,
        }


def judge(timeline: Timeline, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Verdict:
    """Verdict on one iteration."""
    return choose(find_candidates(timeline, thresholds), timeline.step_seconds, thresholds)


def judge_run(
    candidates: Iterable[Sequence[Candidate]], step_seconds: float, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> Verdict:
    """Verdict on a run: candidates of its iterations, whose steps took `step_seconds` together."""
    groups: dict[tuple[str, Cause], list[Candidate]] = defaultdict(list)
    count = 0
    for iteration in candidates:
        count += 1
        for candidate in iteration:
            cause = Cause.SLOW_GRADER if candidate.cause in GRADER_CAUSES else candidate.cause
            groups["" if cause in STEP_WIDE_CAUSES else candidate.role, cause].append(candidate)
    summed = [_summed(cause, group, count, thresholds) for (_, cause), group in groups.items()]
    verdict = choose(sorted(summed, key=lambda c: -c.gain_seconds), step_seconds / max(1, count), thresholds)
    return replace(verdict, num_steps=max(1, count))


def choose(
    candidates: Sequence[Candidate], step_seconds: float, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> Verdict:
    """The dearest specific cause worth naming; else the role that computes for most of the step; else balanced."""
    step = max(step_seconds, 1e-12)
    worth_naming = [c for c in candidates if c.gain_seconds >= thresholds.named_gain * step]
    specific = [c for c in worth_naming if c.cause is not Cause.COMPUTE_BOUND]
    bound = [
        c
        for c in worth_naming
        if c.cause is Cause.COMPUTE_BOUND and float(c.evidence["path_share"]) >= thresholds.compute_share
    ]
    chosen = next(iter([*specific, *bound]), None)
    listed = [
        *bound,
        *(c for c in candidates if c.cause is not Cause.COMPUTE_BOUND and c.gain_seconds >= _LISTED_FRACTION * step),
    ]
    others = tuple(sorted((c for c in listed if c is not chosen), key=lambda c: -c.gain_seconds))
    if chosen is None:
        chosen = Candidate(
            role=BALANCED_ROLE, cause=Cause.BALANCED, gain_seconds=0.0, evidence={"threshold": thresholds.named_gain}
        )
    return Verdict(
        role=chosen.role,
        cause=chosen.cause,
        gain_seconds=chosen.gain_seconds,
        gain_fraction=chosen.gain_seconds / step,
        step_seconds=step_seconds,
        evidence=chosen.evidence,
        others=others,
    )


def _summed(cause: Cause, group: Sequence[Candidate], count: int, thresholds: Thresholds) -> Candidate:
    """One candidate for the run: gain per iteration; evidence summed, highest or mean; role and words of the worst."""
    dearest = max(group, key=lambda candidate: candidate.gain_seconds)
    evidence: dict[str, float | str] = {}
    for key, sample in dearest.evidence.items():
        if isinstance(sample, str):
            evidence[key] = sample
            continue
        numbers = [float(candidate.evidence[key]) for candidate in group if key in candidate.evidence]
        if key == "rank":
            evidence[key] = float(sample)
        elif key in _SUMMED:
            evidence[key] = sum(numbers)
        elif key in _HIGHEST:
            evidence[key] = max(numbers)
        else:
            evidence[key] = sum(numbers) / len(numbers)
    if cause in GRADER_CAUSES:
        kinds = [candidate.cause for candidate in group if candidate.cause is not Cause.RARE_SLOW_GRADER]
        cause = (
            Cause.RARE_SLOW_GRADER
            if is_rare(evidence, thresholds)
            else max(kinds, key=kinds.count, default=dearest.cause)
        )
    gain = sum(candidate.gain_seconds for candidate in group) / max(1, count)
    return Candidate(role=dearest.role, cause=cause, gain_seconds=gain, evidence=evidence)
