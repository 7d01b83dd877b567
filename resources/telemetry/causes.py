"""Causes a step can be held back by, when one is worth a name, and what a found one carries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """The fixed list; advice.py has the words and the change for each."""

    SLOW_GRADER = "slow grader"
    RARE_SLOW_GRADER = "rare slow grader calls"
    SLOW_REWARD_MODEL = "slow reward model"
    SLOW_JUDGE = "slow judge"
    SLOW_SANDBOX = "slow sandbox"
    LONG_TAIL = "rollout long tail"
    KV_CACHE = "KV cache too small"
    SLOW_RANK = "slow rank"
    UNEVEN_TOKENS = "uneven tokens over ranks"
    HEAVY_CRITIC = "critic heavier than the actor"
    SLOW_REFERENCE = "slow reference pool"
    SERIALISE = "driver serialises"
    COLLECT = "driver collects"
    SCHEDULING = "scheduling wait"
    FETCH = "rows fetched slowly"
    COMMUNICATION = "collectives"
    WEIGHT_SYNC = "weight sync"
    SHARED_POOL = "queued behind another role"
    HANGING_TASK = "checkpoint or validation holds the step"
    COMPUTE_BOUND = "compute-bound"
    BALANCED = "balanced"


GRADER_CAUSES = frozenset(
    {Cause.SLOW_GRADER, Cause.RARE_SLOW_GRADER, Cause.SLOW_REWARD_MODEL, Cause.SLOW_JUDGE, Cause.SLOW_SANDBOX}
)

STEP_WIDE_CAUSES = frozenset({Cause.FETCH, Cause.HANGING_TASK})
"""Their excess is of every task that has it, so over a run they are one cause, whoever is the dearest in which step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """When something is worth a name. Ratios of like with like; shares of the step."""

    named_gain: float = 0.15
    """A cause is named only if the step would be this much shorter without it; less is in the noise of a busy node."""
    compute_share: float = 0.6
    """Share of the critical path from which a role without a specific cause is called compute-bound, if it is worth it:
    beside another role that works as long, twice the ranks would gain nothing."""
    skew: float = 1.25
    """Slowest over lower-median rank."""
    tokens_explain: float = 0.7
    """Share of a rank's excess that its tokens must explain for the data, not the rank, to be the cause."""
    heavier: float = 1.5
    """Critic over actor, reference over actor log-probs."""
    communication_share: float = 0.3
    """Of a rank's execution, on the rank that waits least."""
    rare_calls: float = 0.1
    """At most this share of grader calls may be slow for them to be rare."""
    kv_cache_full: float = 0.95


DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A cause found in one iteration, or summed over several."""

    role: str
    cause: Cause
    gain_seconds: float
    """The step would have been this much shorter without the cause's excess."""
    evidence: Mapping[str, float | str] = field(default_factory=dict)


def is_rare(evidence: Mapping[str, float | str], thresholds: Thresholds) -> bool:
    """Whether a few slow calls, not the usual ones, made the grading long."""
    calls, slow = float(evidence.get("calls", 0)), float(evidence.get("slow_calls", 0))
    return 0 < slow <= max(1.0, thresholds.rare_calls * calls) and calls > 2
