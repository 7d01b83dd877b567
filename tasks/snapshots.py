"""Snapshots in memory: the state of all stateful roles after an iteration, kept in the object store by reference.

The controller owns the references, so neither a dead worker nor a dead task host takes them along; no tensor passes
through it. A snapshot counts once every role and the run's own numbers are in it; then the one before it goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.experimental

from resources.checkpoints import Manifest
from resources.failures import WorkerFailed
from resources.worker_group import WorkerGroup
from tasks.run_state import RunState

_LOST = {kind.__name__ for kind in vars(ray.exceptions).values()
         if isinstance(kind, type) and issubclass(kind, ray.exceptions.ObjectLostError)}  # fmt: skip
"""Types of exceptions that a worker raises for an argument that is in no store any more."""
INLINE_BYTES = 102_400
"""Smaller objects live in their owner's memory, not in a node's store."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a rollback needs."""

    state: RunState
    metrics_bytes: int
    pieces: Mapping[str, tuple[Any, ...]]
    """Duty -> a reference per rank."""
    manifest: Manifest | None = None
    """Of a checkpoint with this state."""
    copies: Sequence[Any] = ()
    """A reference for each node that was asked to hold pieces of another one; ready when it does."""

    @property
    def is_copied(self) -> bool:
        """Whether every piece is on two nodes, so that losing one of them costs nothing."""
        if not self.copies:
            return False
        done, _ = ray.wait(list(self.copies), num_returns=len(self.copies), timeout=0, fetch_local=False)
        return len(done) == len(self.copies)

    def is_whole(self, timeout_seconds: float = 5.0) -> bool:
        """Whether every piece is still in the object store (a lost node takes its pieces along)."""
        refs = [ref for pieces in self.pieces.values() for ref in pieces]
        try:
            done, _ = (
                ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds, fetch_local=False) if refs else ([], [])
            )
        except ray.exceptions.RayError:
            return False
        return len(done) == len(refs) and all(_is_there(ref) for ref in done)

    def fits(self, groups: Mapping[str, WorkerGroup]) -> bool:
        """Whether the groups have as many ranks as when it was taken."""
        return all(len(pieces) == groups[duty].world_size for duty, pieces in self.pieces.items())


def take_snapshot(
    groups: Mapping[str, WorkerGroup], state: RunState, metrics_bytes: int, manifest: Manifest | None = None
) -> Snapshot:
    """Ask the stateful roles (`groups`) for their state, all at the same time. Raises WorkerFailed."""
    calls = {duty: group.submit("snapshot") for duty, group in groups.items()}
    pieces = {duty: tuple(ref for _, ref in call.result()) for duty, call in calls.items()}
    return Snapshot(state=state, metrics_bytes=metrics_bytes, pieces=pieces, manifest=manifest)


def pieces_by_node(groups: Mapping[str, WorkerGroup], snapshot: Snapshot) -> dict[str, list[Any]]:
    """Node id -> references to the pieces that its ranks made."""
    found: dict[str, list[Any]] = {}
    for duty, pieces in snapshot.pieces.items():
        for rank, piece in zip(groups[duty].ranks, pieces, strict=True):
            found.setdefault(rank["node_id"], []).append(piece)
    return found


def restore_snapshot(groups: Mapping[str, WorkerGroup], snapshot: Snapshot) -> bool:
    """Bring every stateful role back to the snapshot, all at the same time.

    False when a piece turns out to be lost after all: what the store says of a node that has just died may be old. Some
    roles are back then, and others are not. Raises WorkerFailed.
    """
    calls = [groups[duty].submit("restore", list(pieces)) for duty, pieces in snapshot.pieces.items()]
    is_whole = True
    for call in calls:
        try:
            call.result()
        except WorkerFailed as error:
            if error.failure.exception_type not in _LOST:
                raise
            is_whole = False
    return is_whole


def _is_there(ref: Any) -> bool:
    try:
        where = ray.experimental.get_object_locations([ref])[ref]
    except (ray.exceptions.RayError, ValueError):
        return False
    size = where["object_size"]
    return bool(where["node_ids"]) or size is None or size < INLINE_BYTES
