"""A worker whose state is saved, restored and compared bit by bit: checkpoints on disk, snapshots in memory."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from resources.dispatch import Dispatch, dispatch
from resources.models.sharding import local_part
from resources.models.weights import fill
from resources.tensor_files import load_scalars, load_tensors, pieces_of, save_tensors
from resources.workers.base import ModelWorker, Status

RANDOM = "rank.rng"
"""Name of a rank's random stream among the tensors; a state without it has none."""


class KeepsState(ModelWorker, ABC):
    """A subclass gives `state`, and `settle` where more than tensors comes back."""

    _random: Tensor | None = None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """`tensors` (cut ones as DTensors; loading may write into them in place) and JSON `scalars`."""

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """Take over `scalars` after the tensors came back."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over tensors (whole, or cut as they are here) and scalars; the random stream comes last.

        Raises ValueError naming the first tensor that is absent.
        """
        for name, own in self.state()["tensors"].items():
            if name == RANDOM:
                continue
            if name not in state["tensors"]:
                raise ValueError(
                    f"{self.role}: tensor {name!r} is not in the state; it has {sorted(state['tensors'])[:5]}..."
                )
            fill(own, state["tensors"][name])
        self._settle(state)

    @dispatch(Dispatch.BROADCAST)
    def save_checkpoint(self, folder: str) -> Status:
        """Write this rank's pieces below `folder`/role; every rank writes its own. `files` tells their checksums.

        Raises NotFiniteError for weights with nan in them, OSError when the disk says no.
        """
        watch, state = self.stopwatch(), self.state()
        sums = save_tensors(Path(folder) / self.role, self.rank, state["tensors"], state["scalars"])
        return {
            "metrics": {},
            "spans": watch.spans(),
            "files": {f"{self.role}/{name}": checksum for name, checksum in sums.items()},
        }

    @dispatch(Dispatch.BROADCAST)
    def load_checkpoint(self, folder: str) -> Status:
        """Fill weights, moments, counters and random stream from `folder`/role, whatever the sharding was then."""
        watch, state = self.stopwatch(), self.state()
        place = Path(folder) / self.role
        load_tensors(place, state["tensors"], self.rank)
        self.load_state({"tensors": state["tensors"], "scalars": load_scalars(place, self.rank)})
        return {"metrics": {}, "spans": watch.spans()}

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def snapshot(self) -> tuple[Status, dict[str, Any]]:
        """A copy of this rank's own pieces, for `restore` under the same sharding, or for `write_pieces`."""
        watch, state = self.stopwatch(), self.state()
        pieces = pieces_of(self.rank, state["tensors"], state["scalars"])
        copies = {
            name: pieces.tensors[name]
            if self.answers_are_copied or local_part(live).is_cuda
            else pieces.tensors[name].clone()
            for name, live in state["tensors"].items()
        }
        kept = {"tensors": copies, "boxes": dict(pieces.boxes), "scalars": dict(pieces.scalars)}
        return {"metrics": {}, "spans": watch.spans()}, kept

    @dispatch(Dispatch.PER_RANK)
    def restore(self, snapshot: Mapping[str, Any]) -> Status:
        """Back to a `snapshot` of a rank that was cut as this one is. Raises ValueError where a shape differs."""
        watch = self.stopwatch()
        for name, own in self.state()["tensors"].items():
            piece = snapshot["tensors"][name]
            if name != RANDOM and local_part(own).shape != piece.shape:
                raise ValueError(
                    f"{self.role}: piece {name!r} has shape {tuple(piece.shape)} and this rank holds "
                    f"{tuple(local_part(own).shape)}; a snapshot fits its own world size; load a checkpoint"
                )
            local_part(own).copy_(piece)
        self._settle(snapshot)
        return {"metrics": {}, "spans": watch.spans()}

    @dispatch(Dispatch.BROADCAST)
    def restore_random(self) -> None:
        """The random stream as it was last restored: whatever else comes back in this process may draw from it."""
        if self._random is not None:
            torch.set_rng_state(self._random)

    def _settle(self, state: Mapping[str, Any]) -> None:
        self.settle(state["scalars"])
        if RANDOM in state["tensors"]:
            self._random = state["tensors"][RANDOM].clone()
            self.restore_random()
