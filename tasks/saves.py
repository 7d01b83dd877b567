"""Checkpoints from the controller's side: begun, written beside the run, published, given up.

Publishing is one rename. Whatever goes wrong with a save (a full disk, a writer that died) is told loudly and the
run goes on with the last checkpoint; only weights that are no numbers end it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from prefect.logging import get_logger

from resources.checkpoints import Manifest
from resources.snapshot_writer import write_snapshot
from resources.tensor_files import NotFiniteError
from tasks.manifests import manifest_of
from tasks.session import Session
from tasks.snapshots import Snapshot

WAIT_SECONDS = 600.0
"""Longest the end of a run, or the next save, waits for one that is being written."""
MAX_TRIES = 3
EXIT_SECONDS = 10.0
"""A run that is stopped writes its newest snapshot within this, or leaves it to the last checkpoint."""


class NanWeightsError(RuntimeError):
    """A role's state holds nan or infinity: it is not saved, and the run stops, resumable."""


@dataclass(kw_only=True)
class PendingSave:
    """A checkpoint that is being written beside the run."""

    staging: Path
    manifest: Manifest
    snapshot: Snapshot
    refs: Mapping[Any, str]
    """Reference to checksums -> folder of the role below `staging`."""
    began: float = field(default_factory=time.monotonic)
    nodes: tuple[str, ...] = ()
    tries: int = 1
    """A writer that dies says nothing about the disk; its save is written again."""


def begin_save(run: Session, snapshot: Snapshot, metrics: Mapping[str, float]) -> None:
    """Begin to write `snapshot` beside the run; waits for the save before it, if that still goes on."""
    publish_finished(run, WAIT_SECONDS)
    try:
        staging = run.checkpoints.begin(snapshot.state.iteration)
    except OSError as error:
        _give_up(run, None, snapshot.state.iteration, error)
        return
    run.saves.append(_write_beside(run, staging, snapshot, manifest_of(run, metrics)))


def _write_beside(run: Session, staging: Path, snapshot: Snapshot, manifest: Manifest, tries: int = 1) -> PendingSave:
    refs: dict[Any, str] = {}
    nodes: list[str] = []
    for duty, pieces in snapshot.pieces.items():
        for rank, piece in enumerate(pieces):
            ranks = run.groups[duty].ranks
            nodes.append(ranks[min(rank, len(ranks) - 1)]["node_id"])  # fewer of them since a node was lost
            refs[run.writers.write(nodes[-1], str(staging / duty), rank, piece)] = duty
    return PendingSave(
        staging=staging, manifest=manifest, snapshot=snapshot, refs=refs, nodes=tuple(nodes), tries=tries
    )


def publish_finished(run: Session, wait_seconds: float = 0.0) -> None:
    """Publish the saves that are written by now, waiting up to `wait_seconds` for those that are not.

    Raises NanWeightsError.
    """
    for save in list(run.saves):
        done, pending = ray.wait(list(save.refs), num_returns=len(save.refs), timeout=wait_seconds, fetch_local=False)
        if pending and not wait_seconds and time.monotonic() - save.began < WAIT_SECONDS:
            return
        run.saves.remove(save)
        if pending:
            reason = TimeoutError(f"not written after {time.monotonic() - save.began:.0f} s")
            _give_up(run, save.staging, save.manifest.iteration, reason)
            continue
        try:
            sums = {f"{save.refs[ref]}/{name}": value for ref in done for name, value in ray.get(ref).items()}
        except (OSError, NotFiniteError, ray.exceptions.RayError) as error:
            for node in save.nodes:
                run.writers.forget(node)
            if isinstance(error, ray.exceptions.RayActorError) and save.tries < MAX_TRIES and save.snapshot.is_whole():
                again = _write_beside(run, save.staging, save.snapshot, save.manifest, save.tries + 1)
                run.saves.append(again)
                run.directory.event("save-repeated", iteration=save.manifest.iteration, reason=str(error)[:200])
            else:
                _give_up(run, save.staging, save.manifest.iteration, error)
            continue
        publish(run, save.staging, save.manifest, sums)
    if wait_seconds and run.saves:  # those written again
        publish_finished(run, wait_seconds)


def make_room(run: Session, staged: Mapping[str, Any] | None) -> None:
    """Give back what failed saves have written, before the iteration's own lines need the room.

    `staged`: facts of the iteration's checkpoint step, if it had one. Raises NanWeightsError.
    """
    publish_finished(run)
    if staged is not None and "error" in staged:
        run.checkpoints.discard(Path(staged["folder"]))


def publish(run: Session, staging: Path, manifest: Manifest, checksums: Mapping[str, str]) -> None:
    """Make a written checkpoint count, and remove those that are no longer kept."""
    try:
        run.checkpoints.commit(staging, manifest, checksums)
    except OSError as error:
        _give_up(run, staging, manifest.iteration, error)
        return
    run.directory.event("checkpoint", iteration=manifest.iteration)
    _prune(run, manifest.iteration)


def _prune(run: Session, newest: int) -> None:
    """Remove the checkpoints that are no longer kept; what the disk does not let go is told and tried again later."""
    settings = run.config.checkpoint
    try:
        best = run.checkpoints.best(settings.keep_best) if settings.keep_best else None
        run.checkpoints.prune(settings.keep, {best} if best is not None else (), newest=newest)
    except OSError as error:
        run.directory.event("prune-failed", iteration=newest, reason=str(error))
        get_logger("callsheet").warning(
            "iteration %d is saved, but older checkpoints could not be removed (%s); the next save tries again",
            newest,
            error,
        )


def publish_staged(run: Session, facts: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Publish what the checkpoint step wrote, or tell why it could not. Raises NanWeightsError."""
    staging = Path(facts["folder"])
    if "error" in facts:
        error: Exception = OSError(facts["error"])
        if facts.get("is_nan"):
            error = NotFiniteError(facts["error"])
        _give_up(run, staging, run.state.iteration, error)
        return
    publish(run, staging, manifest_of(run, metrics), facts["files"])


def save_last_iteration(run: Session) -> None:
    """For a run that is stopped: the newest snapshot becomes a checkpoint, written by this very process."""
    staging, snapshot = None, run.snapshot
    if snapshot is None or snapshot.manifest is None:
        return
    try:
        publish_finished(run, EXIT_SECONDS)
        run.writers.stop()  # none may write beside this process
        on_disk = set(run.checkpoints.iterations()) - run.checkpoints.passed_over
        if snapshot.state.iteration <= max(on_disk, default=0):
            return
        staging = run.checkpoints.begin(snapshot.state.iteration)
        sums: dict[str, str] = {}
        for duty, pieces in snapshot.pieces.items():
            for rank, kept in enumerate(ray.get(list(pieces), timeout=EXIT_SECONDS)):
                written = write_snapshot(staging / duty, rank, kept)
                sums |= {f"{duty}/{name}": value for name, value in written.items()}
        publish(run, staging, snapshot.manifest, sums)
    except (OSError, NotFiniteError, NanWeightsError, ray.exceptions.RayError) as error:
        _tell(run, staging, snapshot.state.iteration, error)


def _give_up(run: Session, staging: Path | None, iteration: int, error: Exception) -> None:
    _tell(run, staging, iteration, error)
    if isinstance(error, NotFiniteError):
        raise NanWeightsError(
            f"after iteration {iteration}: {error}. Lower optimizer.lr or optimizer.max_grad_norm of the actor or the"
            f" critic in {run.directory.config_file} and go on from the last checkpoint: callsheet resume"
            f" {run.directory.path}"
        ) from error


def _tell(run: Session, staging: Path | None, iteration: int, error: Exception) -> None:
    if staging is not None:
        run.checkpoints.discard(staging)
    run.failed_saves += 1
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error  # without the writer's traceback
    text = " ".join(str(cause).split())[-400:]
    run.directory.event("save-failed", iteration=iteration, reason=text)
    get_logger("callsheet").error(
        "the checkpoint of iteration %d was NOT saved (%s); the run goes on, the last checkpoint stays", iteration, text
    )
