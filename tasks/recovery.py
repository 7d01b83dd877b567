"""Recovery, one protocol: processes restart per role, state rolls back per run.

On a fault the controller (1) lets the iteration's subflow fail, (2) rebuilds what is dead under a new incarnation,
(3) drops every column of the open iteration, (4) brings all stateful roles back to the newest snapshot, in memory or
on disk, (5) cuts metrics and spans to it, and (6) the loop runs the iteration again as another attempt.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect.logging import get_logger
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError

from resources.casting import distinct_groups
from resources.checkpoints import Manifest
from resources.failures import Failure, WorkerFailed
from resources.reward_scores import Moments
from tasks.collect import StepFailedError
from tasks.hosts import HostLostError
from tasks.manifests import manifest_of
from tasks.rebuild import drain, find_deaths, rebuild
from tasks.run_state import RunState
from tasks.saves import WAIT_SECONDS, publish_finished
from tasks.session import Session
from tasks.snapshots import Snapshot, pieces_by_node, restore_snapshot, take_snapshot

RECOVERABLE_KINDS = ("exit code", "signal", "out of memory", "node lost", "stopped", "deadline", "stale")
"""An exception inside a worker is not among them: it would come again, so it ends the run with its own text."""
FAULTS = (StepFailedError, WorkerFailed, HostLostError, TimeoutError, ObjectLostError, RayActorError)
MAX_BACKOFF = 8


class OutOfRecoveriesError(RuntimeError):
    """The budget `recovery.max_recoveries` is used up; the run stops, resumable. The first fault is the cause."""


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """What is told of a fault."""

    error: BaseException
    noticed: float

    @property
    def cause(self) -> BaseException:
        error = self.error
        return error.__cause__ if isinstance(error, StepFailedError) and error.__cause__ is not None else error

    @property
    def failure(self) -> Failure | None:
        return self.cause.failure if isinstance(self.cause, WorkerFailed) else None

    def facts(self) -> dict[str, Any]:
        """For the event: who, where, what kind, and the first line of the story."""
        known = self.failure
        told: dict[str, Any] = {"role": "task host", "fault": type(self.cause).__name__}
        if known is not None:
            told = {
                "role": known.role, "fault": known.kind, "group": known.group, "rank": known.rank,
                "node": known.node_ip, "pid": known.pid, "method": known.method,
            }  # fmt: skip
        return {**told, "noticed": self.noticed, "cause": str(self.error).splitlines()[0]}


def is_recoverable(run: Session, error: BaseException) -> bool:
    """Whether a fault is the end of a process (or a missed deadline), as against an error that would come again.

    An exception in a living worker counts when a process it depended on is dead: it is what the death looked like
    from there.
    """
    cause = _Fault(error=error, noticed=0.0).cause
    if isinstance(cause, WorkerFailed) and cause.failure.kind in RECOVERABLE_KINDS:
        return True
    if isinstance(cause, HostLostError | TimeoutError | ObjectLostError | WorkerCrashedError):
        return True
    if isinstance(cause, RayActorError) and not isinstance(cause, RayTaskError):
        return True
    return find_deaths(run)


@contextlib.contextmanager
def recovering(run: Session) -> Iterator[None]:
    """Run an iteration; a fault that can be repaired is, and the loop goes on from the state rolled back to.

    Raises what cannot be repaired, or OutOfRecoveriesError.
    """
    try:
        yield
    except FAULTS as error:
        fault = _Fault(error=error, noticed=time.monotonic())
        if not (run.config.recovery.enabled and is_recoverable(run, error)):
            raise
        _recover(run, fault)


@contextlib.contextmanager
def repeating(run: Session) -> Iterator[None]:
    """Run what has no state to roll back to; after a fault that can be repaired the caller runs it again."""
    try:
        yield
    except FAULTS as error:
        if not (run.config.recovery.enabled and is_recoverable(run, error)):
            raise
        fault = _Fault(error=error, noticed=time.monotonic())
        _spend(run, fault)
        drain(run)
        run.directory.event("repeated", rebuilt=rebuild(run), **fault.facts())


def keep_snapshot(run: Session, metrics: Mapping[str, float], *, is_forced: bool = False) -> None:
    """Take a snapshot of the state just committed, where `recovery.snapshot_every` (or a save) asks for one."""
    recovery = run.config.recovery
    is_due = recovery.enabled and run.state.iteration % recovery.snapshot_every == 0
    if is_due or is_forced:
        manifest, before = manifest_of(run, metrics), run.snapshot
        taken = take_snapshot(run.stateful_groups, run.state, manifest.metrics_bytes, manifest)
        if len({rank["node_id"] for group in run.groups.values() for rank in group.ranks}) > 1:
            taken = replace(taken, copies=run.writers.copy_to_another_node(pieces_by_node(run.groups, taken)))
            run.spare = before if before is not None and before.is_copied else run.spare
        run.snapshot = taken


def _recover(run: Session, first: _Fault) -> None:
    failed_at = run.state.iteration
    fault = first
    while True:
        _spend(run, first)
        try:
            if fault.failure is not None:
                run.suspects.add(fault.failure.group)
            drain(run)
            rebuilt = rebuild(run)
            _roll_back(run)
            break
        except FAULTS as again:
            fault = _Fault(error=again, noticed=time.monotonic())
            run.directory.event("recovery-failed", iteration=failed_at, **fault.facts())
            if not is_recoverable(run, again):
                raise
    for iteration in range(run.state.iteration, failed_at + 1):
        run.failed_attempts[iteration] += 1
    seconds = round(time.monotonic() - first.noticed, 3)
    run.directory.event(
        "recovered",
        iteration=failed_at,
        rolled_back_to=run.state.iteration,
        rebuilt=rebuilt,
        seconds=seconds,
        **first.facts(),
    )
    get_logger("callsheet").warning(
        "recovered in %.1f s: %s back, iteration %d runs again (%s)",
        seconds, ", ".join(rebuilt) or "nothing had to come", run.state.iteration, first.facts()["cause"],
    )  # fmt: skip
    run.lap()


def _spend(run: Session, first: _Fault) -> None:
    """Take one recovery from the budget, and wait before all but the first of a row without a good iteration."""
    recovery = run.config.recovery
    if run.recoveries >= recovery.max_recoveries:
        raise OutOfRecoveriesError(
            f"{run.recoveries} recoveries are done and recovery.max_recoveries allows no more; "
            f"the run can be resumed: callsheet resume {run.directory.path}. First cause: {first.error}"
        ) from first.error
    if run.recoveries_in_a_row:
        time.sleep(recovery.backoff_seconds * min(MAX_BACKOFF, 2 ** (run.recoveries_in_a_row - 1)))
    run.recoveries += 1
    run.recoveries_in_a_row += 1


def _roll_back(run: Session) -> None:
    """All stateful roles, the run's numbers, and the files go back to one committed point."""
    _drop_open_batches(run)
    if not _restored(run):
        _start_over(run)
    run.directory.cut_after(run.directory.spans, run.state.iteration)
    restore_reward_state(run)
    run.synchronise()
    if run.snapshot is None or run.snapshot.state is not run.state:
        keep_snapshot(run, {}, is_forced=True)


def _restored(run: Session) -> bool:
    """Whether there was something to go back to: of what is whole in memory and on the disk, the newest."""
    kept = [one for one in (run.snapshot, run.spare) if one is not None]
    if kept and not _is_saved_after(run, kept[0]) and _restored_from(run, kept.pop(0)):
        return True
    newest = _newest_on_disk(run)
    for one in kept:
        if (newest is None or one.state.iteration > newest.iteration) and _restored_from(run, one):
            return True
    run.snapshot = run.spare = None  # they hold a state that the run is about to leave
    if newest is None:
        return False
    run.state = RunState.from_json(newest.state).under(run.config)
    run.resumed_folder = str(run.checkpoints.path_of(newest.iteration))
    run.directory.cut(run.directory.metrics, newest.metrics_bytes)
    return True


def _is_saved_after(run: Session, snapshot: Snapshot) -> bool:
    """Whether a checkpoint is newer than the snapshot, which would cut lines that it counts.

    Until they were written again no checkpoint could be gone on from.
    """
    saved = {*run.checkpoints.iterations(), *(save.manifest.iteration for save in run.saves)}
    return max(saved - run.checkpoints.passed_over, default=0) > snapshot.state.iteration


def _restored_from(run: Session, snapshot: Snapshot) -> bool:
    """Whether all stateful roles and the run's numbers are back at `snapshot`, which is in memory."""
    if not (snapshot.fits(run.groups) and snapshot.is_whole()):
        return False
    if not restore_snapshot(run.groups, snapshot):
        return False
    run.snapshot, run.state = snapshot, snapshot.state
    run.directory.cut(run.directory.metrics, snapshot.metrics_bytes)
    return True


def _newest_on_disk(run: Session) -> Manifest | None:
    """The newest checkpoint, those included that are being written: published later, they would count lines cut now."""
    publish_finished(run, WAIT_SECONDS)
    return run.checkpoints.latest(run.directory.metrics)[0]


def restore_reward_state(run: Session) -> None:
    """The running normalisation of scores, in the reward workers, as the run's state has it."""
    if run.config.reward.normalise and "reward" in run.groups:
        run.groups["reward"].call("load_state", run.state.parts.get("reward", Moments().to_json()))


def _drop_open_batches(run: Session) -> None:
    batch_ids = {batch_id for held in run.hosts.batch_ids().values() for batch_id in held}
    for batch_id in sorted(batch_ids | {run.stamp().batch_id}):
        run.hosts.drop(batch_id)
        if "reward" in run.groups:
            run.groups["reward"].call("forget", batch_id)
    run.forget_ahead()


def _start_over(run: Session) -> None:
    """No snapshot and no checkpoint is left: the run begins again, from the seeds that made its start."""
    for group in distinct_groups(run.stateful_groups):
        group.restart()
    run.hosts.attach(run.groups)
    run.state = RunState(kl_coef=run.config.algorithm.kl.coef)
    run.directory.cut(run.directory.metrics, 0)
