"""Writes snapshots to disk beside the run: a process on each node that reads the pieces where they lie.

The pieces are in the object store already (every iteration takes a snapshot), so an asynchronous save costs the roles
nothing more. The writer hashes and fsyncs; the controller publishes what it wrote with a rename.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from resources.tensor_files import Pieces, write_pieces

_NICE = 5
"""The roles come first."""


def write_snapshot(folder: Path, rank: int, kept: Mapping[str, Any]) -> dict[str, str]:
    """Write what `TrainedWorker.snapshot` gave below `folder`; returns file name -> checksum.

    Raises OSError, or NotFiniteError for weights that must not be saved.
    """
    return write_pieces(folder, rank, Pieces(kept["tensors"], kept["boxes"], kept["scalars"]))


class _Writer:
    """The Ray actor."""

    def __init__(self) -> None:
        os.nice(_NICE)
        self._held: list[Any] = []

    def write(self, folder: str, rank: int, kept: Mapping[str, Any]) -> dict[str, str]:
        """See `write_snapshot`; Ray hands in the piece itself, read in place."""
        return write_snapshot(Path(folder), rank, kept)

    def hold(self, pieces: Sequence[Any]) -> None:
        """Keep copies of these pieces (references) in this node's store, in place of those held before."""
        self._held = ray.get(list(pieces))

    @ray.method(concurrency_group="watch")
    def facts(self) -> dict[str, Any]:
        """Where it runs; for `tasks.host_watch`."""
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}

    @ray.method(concurrency_group="watch")
    def clock(self) -> float:
        """A sign of life, given while it writes too."""
        return time.monotonic()


class SnapshotWriters:
    """The writers of a run, one on each node that holds pieces, started with the first save there."""

    is_detached = False

    def __init__(self, run_id: str, env: Mapping[str, str]) -> None:
        self._run_id = run_id
        self._env = {**env, "OMP_NUM_THREADS": "1"}
        self._writers: dict[str, ActorHandle[Any]] = {}
        self._started = 0

    def write(self, node_id: str, folder: str, rank: int, piece: Any) -> Any:
        """Begin to write a piece (a reference) on its node; gives a reference to its files' checksums."""
        return self._on(node_id).write.remote(folder, rank, piece)

    def copy_to_another_node(self, pieces: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Begin to copy pieces, by the node that made them, to the next live node, where there is one.

        The loss of a node then costs no snapshot. Nobody waits: the references that come back are ready when a copy is.
        """
        alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        held: dict[str, list[Any]] = {}
        for node_id, own in pieces.items():
            others = [other for other in alive if other != node_id]
            if others:
                held.setdefault(next((other for other in others if other > node_id), others[0]), []).extend(own)
        return [self._on(keeper).hold.remote(copies) for keeper, copies in held.items()]

    @property
    def handles(self) -> dict[str, "ActorHandle[Any]"]:
        """Node id -> the writer there."""
        return dict(self._writers)

    def forget(self, node_id: str) -> None:
        """The writer there died; the next save starts another."""
        self._writers.pop(node_id, None)

    def stop(self) -> None:
        """End all writers."""
        for writer in self._writers.values():
            ray.kill(writer)
        self._writers.clear()

    def _on(self, node_id: str) -> "ActorHandle[Any]":
        if node_id not in self._writers:
            self._writers[node_id] = self._start(node_id)
        return self._writers[node_id]

    def _start(self, node_id: str) -> "ActorHandle[Any]":
        self._started += 1
        options: dict[str, Any] = {
            "name": f"{self._run_id}/snapshot-writer-{self._started}",
            "namespace": self._run_id,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
            "runtime_env": {"env_vars": self._env},
        }
        decorate: Any = ray.remote  # Ray's stubs do not know concurrency_groups
        actor_class = decorate(concurrency_groups={"watch": 1})(_Writer)
        return actor_class.options(**options).remote()
