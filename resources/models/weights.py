"""A model's weights as a stream of named whole tensors in buckets, and back into a model that is cut over ranks.

Names are those of the saved model, so an engine or another framework can load them. Memory is bounded by a bucket:
cut tensors are gathered one by one, and every rank must run through the stream together.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from resources.models.sharding import DTYPES, local_part

Bucket = list[tuple[str, Tensor]]


def in_buckets(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: str, ties: Mapping[str, str]
) -> Iterator[Bucket]:
    """Cast floating tensors to the wire `dtype` and group them into buckets of at most `bucket_bytes`.

    A tensor larger than that is a bucket of its own. `ties` maps a second name to the name whose memory it shares:
    it follows in the same bucket as the same tensor object, so its bytes need to be sent only once.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least 1 byte")
    seconds: dict[str, list[str]] = {}
    for second, first in ties.items():
        seconds.setdefault(first, []).append(second)
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        wire = tensor.detach().to(DTYPES[dtype]) if tensor.is_floating_point() else tensor.detach()
        if bucket and size + wire.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, wire))
        bucket += [(second, wire) for second in seconds.get(name, [])]
        size += wire.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def fill(own: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, or one cut alike, into `own` in place."""
    if isinstance(own, DTensor) and not isinstance(whole, DTensor):
        whole = distribute_tensor(whole.to(own.device, own.dtype), own.device_mesh, own.placements, src_data_rank=None)
    local_part(own).copy_(local_part(whole))


def tensor_checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor, the same on every device.

    >>> tensor_checksum(torch.tensor([1.0])) == tensor_checksum(torch.tensor([1.0]).clone())
    True
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy())  # pyright: ignore[reportArgumentType]
