"""The weight sync step: the actor's new weights go to the rollout engines, checked."""

from tasks.stamp import Stamp
from tasks.step import StepResult, step


@step(role="actor")
def weight_sync(at: Stamp, policy_version: int) -> StepResult:
    """Publish the actor's weights to the engines as `policy_version`; no tensor passes through this process."""
    return StepResult()
