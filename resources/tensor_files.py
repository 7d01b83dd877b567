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
from typing import Any, cast

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

Json = dict[str, Any]
_CHUNK = 16 * 2**20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one rank holds of a role, on the CPU, and where it lies in the whole tensors."""

    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Json]
    """Of the pieces this rank writes; of those that several ranks hold, the first of them writes it."""
    scalars: Json


class NotFiniteError(ValueError):
    """Weights or optimizer state hold nan or infinity; they are never saved over good ones."""


def pieces_of(rank: int, tensors: Mapping[str, Tensor], scalars: Json) -> Pieces:
    """This rank's pieces of `tensors`, which may hold DTensors (cut) and plain tensors (the same on all ranks).

    Names that start with `rank.` are this rank's own. On the CPU the pieces are the live tensors, not copies.
    """
    pieces: dict[str, Tensor] = {}
    boxes: dict[str, Json] = {}
    for name, tensor in tensors.items():
        local, box, whole = _local_piece(tensor)
        pieces[name] = local.detach().to("cpu")
        if _is_written_by(rank, name, tensor) and (local.numel() > 0 or not whole):
            boxes[name] = {"offset": list(box.offset), "shape": list(box.shape), "whole": list(whole)}
    return Pieces(pieces, boxes, scalars)


def _is_written_by(rank: int, name: str, tensor: Tensor) -> bool:
    if name.startswith("rank."):
        return True
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        at == 0 for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()
    )


def save_tensors(folder: Path, rank: int, tensors: Mapping[str, Tensor], scalars: Json) -> dict[str, str]:
    """Write this rank's pieces to `folder`; see `pieces_of` and `write_pieces`. `scalars` must be JSON."""
    return write_pieces(folder, rank, pieces_of(rank, tensors, scalars))


def write_pieces(folder: Path, rank: int, pieces: Pieces) -> dict[str, str]:
    """Write a safetensors file and its index, fsynced; returns file name -> checksum.

    The file is written straight from the tensors' memory: the library's own writer copies every tensor first, and
    hides a full disk behind an error of its own.

    Raises NotFiniteError, or OSError when the disk says no.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank-{rank:05d}"
    named = {key: pieces.tensors[key].contiguous() for key in sorted(pieces.boxes)}
    check_finite(named)
    index = json.dumps({"boxes": dict(pieces.boxes), "scalars": pieces.scalars}, sort_keys=True).encode()
    sums = {
        f"{name}.safetensors": _write(folder / f"{name}.safetensors", _safetensors_parts(named)),
        f"{name}.json": _write(folder / f"{name}.json", [memoryview(index)]),
    }
    return sums


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NotFiniteError naming the first tensor with nan or infinity in it."""
    for name, tensor in tensors.items():
        # A sum is finite only if every term is; one that overflows is looked at term by term.
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum())) and not torch.isfinite(tensor).all():
            raise NotFiniteError(f"{name!r} holds nan or infinity; the state is not saved, the last checkpoint stays")


def file_checksum(path: Path) -> str:
    """Checksum of a file as manifests hold it: it finds damage, it is no protection against forgery."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _safetensors_parts(named: Mapping[str, Tensor]) -> list[memoryview]:
    """Header and data of a safetensors file (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Json] = {}
    data: list[memoryview] = []
    at = 0
    for name, tensor in named.items():
        flat = memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(flat)],
        }
        data.append(flat)
        at += len(flat)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *data]


def _write(path: Path, parts: Sequence[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = part[start : start + _CHUNK]
                    digest.update(chunk)
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # on a full disk the rest of the run needs the room
        raise
    return digest.hexdigest()


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
    filled: set[Box] = set()
    with torch.no_grad():
        for path, stored_box, stored_whole in pieces:
            if stored_whole != whole:
                raise TensorFileError(f"tensor {name!r} has shape {whole}; the checkpoint has {stored_whole}")
            part = box.overlap(stored_box) if whole else box
            if part is None or part in filled:  # a second copy of it: several ranks may have held it
                continue
            filled.add(part)
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


def sync_file(path: Path) -> None:
    """Have the bytes (or the directory entries) of `path` on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
