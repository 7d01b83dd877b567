"""Recovery, one protocol: processes restart per role, state rolls back per run.

On a fault the controller (1) lets the iteration's subflow fail, (2) rebuilds what is dead under a new incarnation,
(3) drops every column of the open iteration, (4) brings all stateful roles back to the newest snapshot, in memory or
on disk, (5) cuts metrics and spans to it, and (6) the loop runs the iteration again as another attempt.
"""

import contextlib
import time
from collections.abc import Iterator

from resources.failures import WorkerFailed
from tasks.collect import StepFailedError
from tasks.hosts import HostLostError
from tasks.rebuild import drain, rebuild
from tasks.run_state import RunState
from tasks.session import Session
from tasks.snapshots import restore_snapshot, take_snapshot

RECOVERABLE_KINDS = ("exit code", "signal", "out of memory", "node lost", "stopped", "deadline", "stale")
"""An exception inside a worker is not among them: it would come again, so it ends the run with its own text."""


class OutOfRecoveriesError(RuntimeError):
    """The budget `recovery.max_recoveries` is used up; the run stops, resumable. The first fault is the cause."""


def is_recoverable(fault: BaseException) -> bool:
    """Whether a fault is the end of a process (or a missed deadline), as against an error that would come again."""
    cause = fault.__cause__ if isinstance(fault, StepFailedError) and fault.__cause__ is not None else fault
    if isinstance(cause, WorkerFailed):
        return cause.failure.kind in RECOVERABLE_KINDS
    return isinstance(cause, HostLostError | TimeoutError) or _is_lost_object(cause)


@contextlib.contextmanager
def recovering(run: Session) -> Iterator[None]:
    """Run an iteration; a fault that can be repaired is, and the loop goes on from the state rolled back to.

    Raises what cannot be repaired, or OutOfRecoveriesError.
    """
    try:
        yield
    except (StepFailedError, WorkerFailed, HostLostError, TimeoutError) as fault:
        if not (run.config.recovery.enabled and is_recoverable(fault)):
            raise
        _recover(run, fault)


def keep_snapshot(run: Session) -> None:
    """Take a snapshot of the state just committed, where `recovery.snapshot_every` says so."""
    if run.config.recovery.enabled and run.state.iteration % run.config.recovery.snapshot_every == 0:
        metrics = run.directory.metrics
        run.snapshot = take_snapshot(run.groups, run.state, metrics.stat().st_size if metrics.exists() else 0)


def _recover(run: Session, fault: BaseException) -> None:
    began, first = time.monotonic(), fault
    failed_at, attempt = run.state.iteration, run.attempt
    while True:
        run.recoveries += 1
        if run.recoveries > run.config.recovery.max_recoveries:
            raise OutOfRecoveriesError(
                f"{run.recoveries - 1} recoveries are done and recovery.max_recoveries allows no more; "
                f"the run can be resumed: callsheet resume {run.directory.path}. First cause: {first}"
            ) from first
        time.sleep(
            run.config.recovery.backoff_seconds * min(8, 2 ** (run.recoveries - 1)) if run.recoveries > 1 else 0.0
        )
        try:
            drain(run)
            rebuilt = rebuild(run)
            _roll_back(run)
            break
        except (WorkerFailed, HostLostError, TimeoutError) as again:
            if not is_recoverable(again):
                raise
            fault = again
    run.attempt = attempt + 1 if run.state.iteration == failed_at else 2
    run.directory.event(
        "recovered",
        iteration=failed_at,
        rolled_back_to=run.state.iteration,
        rebuilt=rebuilt,
        seconds=round(time.monotonic() - began, 3),
        cause=str(first).splitlines()[0],
    )
    run.lap()


def _roll_back(run: Session) -> None:
    """All stateful roles, the run's numbers, and the files go back to one committed point."""
    for pool_batches in run.hosts.batch_ids().values():
        for batch_id in pool_batches:
            run.hosts.drop(batch_id)
    run.forget_ahead()
    snapshot = run.snapshot
    if snapshot is not None and snapshot.fits(run.groups) and snapshot.is_whole():
        restore_snapshot(run.groups, snapshot)
        run.state = snapshot.state
        run.directory.cut(run.directory.metrics, snapshot.metrics_bytes)
    else:
        _load_newest_checkpoint(run)
    run.directory.cut_after(run.directory.spans, run.state.iteration)
    run.history = [line for line in run.history if line["iteration"] < run.state.iteration]
    run.synchronise()


def _load_newest_checkpoint(run: Session) -> None:
    newest, _ = run.checkpoints.latest()
    if newest is None:
        raise OutOfRecoveriesError(
            "the snapshot in memory went with its node and there is no checkpoint on disk yet; start the run again"
        )
    run.state = RunState.from_json(newest.state)
    run.resumed_folder = str(run.checkpoints.path_of(newest.iteration))
    run.directory.cut(run.directory.metrics, newest.metrics_bytes)


def _is_lost_object(cause: BaseException) -> bool:
    from ray.exceptions import ObjectLostError

    return isinstance(cause, ObjectLostError)
