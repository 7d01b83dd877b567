"""What every step of an iteration is told: which iteration, which attempt, which rows, which weights."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Small and plain: it crosses tasks and flows instead of any state.

    >>> Stamp(iteration=41, attempt=2, policy_version=41, epoch=0, start=20992, count=512, kl_coef=0.02).batch_id
    '000041-2'
    """

    iteration: int
    attempt: int
    policy_version: int
    """Weight syncs before this iteration's rollout."""
    epoch: int
    start: int
    """First prompt of the iteration within the epoch's order."""
    count: int
    """Prompts."""
    kl_coef: float
    """Of the pull to the reference; an adaptive controller moves it between iterations."""

    @property
    def batch_id(self) -> str:
        """Names the rollout batch of this iteration and attempt."""
        return f"{self.iteration:06d}-{self.attempt}"

    @property
    def run_name(self) -> str:
        """What the Prefect UI calls the iteration."""
        suffix = f"-attempt-{self.attempt}" if self.attempt > 1 else ""
        return f"iteration-{self.iteration:04d}{suffix}"
