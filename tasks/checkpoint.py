"""The save step: every stateful role writes its state into a staging folder; the controller publishes it."""

from resources.casting import STATEFUL
from tasks.host import host
from tasks.replies import send
from tasks.stamp import Stamp
from tasks.step import StepResult, step


@step(role="actor")
def checkpoint(at: Stamp, folder: str) -> StepResult:
    """Write weights, optimizer states, schedules and random streams of all stateful roles below `folder`."""
    calls = [send(duty, "save_checkpoint", folder) for duty in STATEFUL if duty in host().groups]
    spans = [span for call in calls for span in call.wait().spans]
    return StepResult(spans=tuple(spans), facts={"folder": folder})
