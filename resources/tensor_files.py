"""Tensors of one role on disk: a safetensors file a rank, and a JSON index of which box of which tensor it holds.

Because every stored box carries its place in the whole tensor, a role saved by four ranks loads into two, or
into one process, or into another sharding. Nothing here can run code: safetensors holds bytes, the index is JSON.
(torch.distributed.checkpoint's stock reader unpickles its metadata, so it is not used.)
"""

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Box:
    """Where a rank's piece lies in the whole tensor: first index and extent along every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """The common part, or None.

        >>> Box((0,), (4,)).overlap(Box((2,), (4,)))
        Box(offset=(2,), shape=(2,))
        """
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start, shape) if all(extent > 0 for extent in shape) else None

    def slices_of(self, part: "Box") -> tuple[slice, ...]:
        """Slices that cut `part` (in coordinates of the whole tensor) out of this box."""
        return tuple(
            slice(start - origin, start - origin + extent)
            for start, origin, extent in zip(part.offset, self.offset, part.shape, strict=True)
        )


class TensorFileError(ValueError):
    """A tensor folder that is incomplete or does not fit the tensors it should fill."""


def save_tensors(folder: Path, rank: int, tensors: Mapping[str, Tensor], scalars: Json) -> None:
    """Write this rank's pieces to `folder`, fsynced. Replicated pieces are written by rank 0 alone.

    `tensors` may hold DTensors (their local shard is written) and plain tensors (the same on all ranks unless the
    name says otherwise). `scalars` must be JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, Tensor] = {}
    boxes: dict[str, Json] = {}
    for name, tensor in tensors.items():
        local, box, whole = _local_piece(tensor)
        if local.numel() == 0 and whole:
            continue
        if not isinstance(tensor, DTensor) and rank != 0 and not name.startswith("rank."):
            continue
        pieces[name] = local.detach().to("cpu").contiguous()
        boxes[name] = {"offset": list(box.offset), "shape": list(box.shape), "whole": list(whole)}
    data, index = folder / f"rank-{rank:05d}.safetensors", folder / f"rank-{rank:05d}.json"
    save_file(_unshared(pieces), data)
    index.write_text(json.dumps({"boxes": boxes, "scalars": scalars}, sort_keys=True))
    for path in (data, index):
        sync_file(path)


def load_scalars(folder: Path, rank: int) -> Json:
    """The scalars rank `rank` saved; those of rank 0 where there were fewer ranks."""
    own = folder / f"rank-{rank:05d}.json"
    return json.loads((own if own.exists() else folder / "rank-00000.json").read_text())["scalars"]


def load_tensors(folder: Path, into: MutableMapping[str, Tensor], rank: int) -> None:
    """Fill the tensors of `into`, in place, from the pieces in `folder`, whatever the sharding was when saved.

    Names that start with `rank.` are this rank's own (RNG states) and are skipped when no such rank had saved.
    Raises TensorFileError naming the first tensor that is absent, of another shape, or not wholly covered.
    """
    stored = _index(folder)
    for name, tensor in into.items():
        if name.startswith("rank."):
            own = [piece for piece in stored.get(name, []) if piece[0].stem == f"rank-{rank:05d}"]
            if not own:
                continue
            pieces = own
        else:
            pieces = stored.get(name, [])
        if not pieces:
            raise TensorFileError(f"tensor {name!r} is not in {folder.name}; it holds {sorted(stored)[:5]}...")
        _fill(name, tensor, pieces)


def _fill(name: str, tensor: Tensor, pieces: Sequence[tuple[Path, Box, tuple[int, ...]]]) -> None:
    local, box, whole = _local_piece(tensor)
    covered = 0
    with torch.no_grad():
        for path, stored_box, stored_whole in pieces:
            if stored_whole != whole:
                raise TensorFileError(f"tensor {name!r} has shape {whole}; the checkpoint has {stored_whole}")
            part = box.overlap(stored_box) if whole else box
            if part is None:
                continue
            with safe_open(path, framework="pt") as file:
                piece = file.get_slice(name)[stored_box.slices_of(part)] if whole else file.get_tensor(name)
            local[box.slices_of(part)].copy_(piece)
            covered += piece.numel()
    if covered < local.numel():
        raise TensorFileError(f"tensor {name!r}: {covered} of {local.numel()} values found in the checkpoint")


def _local_piece(tensor: Tensor) -> tuple[Tensor, Box, tuple[int, ...]]:
    if not isinstance(tensor, DTensor):
        return tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), Box(tuple(offset), tuple(shape)), tuple(tensor.shape)


def _index(folder: Path) -> dict[str, list[tuple[Path, Box, tuple[int, ...]]]]:
    found: dict[str, list[tuple[Path, Box, tuple[int, ...]]]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        for name, box in json.loads(path.read_text())["boxes"].items():
            place = Box(tuple(box["offset"]), tuple(box["shape"]))
            found.setdefault(name, []).append((path.with_suffix(".safetensors"), place, tuple(box["whole"])))
    if not found:
        raise TensorFileError(f"{folder} holds no rank-*.json; it is not a folder of tensors")
    return found


def _unshared(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one memory (tied heads): later names get a copy."""
    seen: set[int] = set()
    unshared: dict[str, Tensor] = {}
    for name, piece in pieces.items():
        start = piece.untyped_storage().data_ptr()
        unshared[name] = piece.clone() if start in seen and piece.numel() else piece
        seen.add(start)
    return unshared


def sync_file(path: Path) -> None:
    """Have the bytes (or the directory entries) of `path` on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
