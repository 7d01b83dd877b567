"""The save step: every stateful role writes its state into a staging folder; the controller publishes it.

Only with `checkpoint.asynchronous: false`; otherwise the snapshot that every iteration takes is written beside the run.
"""

from typing import Any

from resources.casting import stateful_duties
from resources.failures import WorkerFailed
from tasks.host import host
from tasks.replies import send
from tasks.stamp import Stamp
from tasks.step import StepResult, step

DISK_ERRORS = ("OSError", "FileNotFoundError", "PermissionError", "NotADirectoryError")
"""A disk that says no costs the checkpoint, not the run."""
NOT_FINITE = "NotFiniteError"


@step(role="actor")
def checkpoint(at: Stamp, folder: str) -> StepResult:
    """Write weights, optimizer states, schedules and random streams of all stateful roles below `folder`.

    Facts: `files` (path below `folder` -> checksum), or `error` (and `is_nan`) when it could not be written.
    """
    calls = [send(duty, "save_checkpoint", folder) for duty in stateful_duties(host().config) if duty in host().groups]
    facts: dict[str, Any] = {"folder": folder, "files": {}}
    spans: list[Any] = []
    for call in calls:
        try:
            replies = call.wait()
        except WorkerFailed as error:
            if error.failure.exception_type not in (*DISK_ERRORS, NOT_FINITE):
                raise
            facts |= {"error": error.failure.detail, "is_nan": error.failure.exception_type == NOT_FINITE}
            continue
        spans += replies.spans
        for status in replies.statuses:
            facts["files"] |= status["files"]
    return StepResult(spans=tuple(spans), facts=facts)
