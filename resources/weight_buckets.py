"""Weights on the wire: a bucket of tensors beside the entries that name, type, shape and checksum them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from resources.engines.base import WeightMismatchError

_WORDS = 2**24
"""Words of an accelerator's checksum in flight at one time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEntry:
    """One named weight of a bucket.

    Two entries with the same `place` share one tensor (a tied head): its bytes are sent once.
    """

    name: str
    place: int
    """Which tensor of the bucket."""
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "WeightEntry":
        return cls(**{**record, "shape": tuple(record["shape"])})


def pack(bucket: Sequence[tuple[str, Tensor]], device: torch.device) -> tuple[list[WeightEntry], list[Tensor]]:
    """Entries and distinct, contiguous tensors of a bucket of (name, tensor); tensors that share memory come once.

    `device` is where the receiver will hold them: each is brought there once, and only then is its checksum taken.
    """
    places: dict[tuple[int, tuple[int, ...]], int] = {}
    entries: list[WeightEntry] = []
    tensors: list[Tensor] = []
    sums: list[int] = []
    for name, tensor in bucket:
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in places:
            places[key] = len(tensors)
            tensors.append(tensor.detach().to(device).contiguous())
            sums.append(checksum(tensors[-1]))
        place = places[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            WeightEntry(name=name, place=place, dtype=dtype, shape=tuple(tensor.shape), checksum=sums[place])
        )
    return entries, tensors


def unpack(entries: Sequence[WeightEntry], tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a received bucket, each checked before it is passed on.

    Raises WeightMismatchError naming the first tensor whose type, shape or bytes are not what was sent.
    """
    sums: dict[int, int] = {}
    for entry in entries:
        tensor = tensors[entry.place]
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (entry.dtype, entry.shape):
            raise WeightMismatchError(
                f"weight {entry.name!r} arrived as {found}; sent was {(entry.dtype, entry.shape)}"
            )
        if entry.place not in sums:
            sums[entry.place] = checksum(tensor)
        if sums[entry.place] != entry.checksum:
            raise WeightMismatchError(
                f"weight {entry.name!r} arrived with checksum {sums[entry.place]:x}; sent was {entry.checksum:x}. Its "
                "bytes "
                "changed on the way"
            )
        yield entry.name, tensor


def checksum(tensor: Tensor) -> int:
    """64-bit checksum of a tensor's bytes, in the dtype it has.

    XXH3 at the speed of memory on a CPU; on an accelerator two sums of words, plain and weighted by position, so that
    nothing is copied to the host. The two do not compare with each other: see `pack`.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        raw: Any = flat.numpy()
        return xxhash.xxh3_64_intdigest(raw)
    plain = weighted = torch.zeros((), dtype=torch.int64, device=flat.device)
    head = flat.numel() // 4 * 4
    words = flat[:head].view(torch.int32)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        plain = plain + part.sum()
        weighted = weighted + (part * torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)).sum()
    rest = flat[head:].to(torch.int64).sum()
    return int(plain * 0x9E3779B1 + weighted + rest) & (2**64 - 1)


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that travel."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def to_flat(tensors: Sequence[Tensor]) -> Tensor:
    """One uint8 tensor [bytes] with all tensors one after another, each on a multiple of 16 bytes."""
    flat = torch.zeros(sum(_padded(tensor) for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8)
        flat[start : start + raw.numel()].copy_(raw)
        start += _padded(tensor)
    return flat


def from_flat(entries: Sequence[WeightEntry], flat: Tensor) -> list[Tensor]:
    """The tensors of `to_flat` as views of `flat`."""
    tensors: list[Tensor] = []
    start = 0
    for entry in entries:
        if entry.place < len(tensors):
            continue
        dtype = getattr(torch, entry.dtype)
        size = int(torch.Size(entry.shape).numel()) * dtype.itemsize
        tensors.append(flat[start : start + size].view(dtype).view(entry.shape))
        start += -(-size // 16) * 16
    return tensors


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 16) * 16
