"""A broadcast channel from the actor's rank 0 to every engine rank: a process group of its own, gloo or NCCL.

It stands beside whatever groups the processes have, meets at a TCPStore that the sender hosts, and serves one
sync: the next one closes it and makes another, and a failure closes it too.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, PrefixStore, ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from resources.weight_buckets import WeightEntry, from_flat, to_flat

SENDER = 0
NO_CARD = "none"


class WeightChannelError(RuntimeError):
    """A broadcast that did not get through, mostly since another end failed first and let go of the channel."""


class WeightChannel:
    """One end of the channel. Rank 0 sends, all others receive; every call is made by all of them."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device, timeout_seconds: float) -> None:
        self.rank = rank
        self.device = device
        self._store = store  # hosts the meeting point as long as the channel lives
        timeout = timedelta(seconds=timeout_seconds)
        name = Backend.NCCL if device.type == "cuda" else Backend.GLOO
        meeting = PrefixStore(f"weights-{name}", store)
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            self._group = ProcessGroupGloo(meeting, rank, size, timeout)

    def send(self, entries: Sequence[WeightEntry], tensors: Sequence[Tensor]) -> None:
        """Broadcast one bucket, packed on the channel's device.

        Raises WeightChannelError, as all that is sent or received here does.
        """
        self._send_json([entry.to_json() for entry in entries])
        if entries:
            self._broadcast(to_flat(tensors))

    def finish(self) -> None:
        """Say that no bucket follows."""
        self._send_json([])

    def receive(self) -> Iterator[tuple[list[WeightEntry], list[Tensor]]]:
        """Buckets as they come, until the sender finishes. Each has memory of its own: an engine may hold on to it."""
        while records := self._receive_json():
            entries = [WeightEntry.from_json(record) for record in records]
            flat = torch.empty(_flat_bytes(entries), dtype=torch.uint8, device=self.device)
            self._broadcast(flat)
            yield entries, from_flat(entries, flat)

    def close(self) -> None:
        """Let go of the group and the meeting point."""
        self._group.shutdown()

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self._group.broadcast(tensor, SENDER).wait()
        except RuntimeError as error:  # gloo and NCCL have no narrower class for a peer that went away
            raise WeightChannelError(f"rank {self.rank} of the weight channel got nothing through: {error}") from error

    def _send_json(self, value: Any) -> None:
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([raw.numel()], device=self.device))
        self._broadcast(raw)

    def _receive_json(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(length)
        raw = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(raw)
        return json.loads(bytes(raw.cpu().numpy()))


class HasWeightChannel:
    """Mixin of a worker at either end: the channel, as long as it is open."""

    _weight_channel: WeightChannel | None = None

    def _open_channel(self, host: str, port: int, rank: int, num_receivers: int, timeout_seconds: float) -> None:
        """Meet the others at the sender's store (see `rendezvous.host_store`); returns when all are there."""
        self._close_channel()
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
        device = agreed_device(store, rank, num_receivers + 1, wire_card())
        self._weight_channel = WeightChannel(store, rank, num_receivers + 1, device, timeout_seconds)

    def _close_channel(self) -> None:
        if self._weight_channel is not None:
            self._weight_channel.close()
            self._weight_channel = None


def wire_card() -> str:
    """Which accelerator this process would send from; `NO_CARD` without one."""
    if not torch.cuda.is_available():
        return NO_CARD
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def agreed_device(store: Store, rank: int, size: int, card: str) -> torch.device:
    """Where the bytes of a channel lie: on the accelerators where each end has one of its own, else in host memory.

    All ends meet here. NCCL reaches no end without an accelerator, and takes no two ends on the same one.
    """
    store.set(f"weights-card-{rank}", card)
    cards = [store.get(f"weights-card-{end}").decode() for end in range(size)]
    return torch.device("cuda" if NO_CARD not in cards and len(set(cards)) == size else "cpu")


def _flat_bytes(entries: Sequence[WeightEntry]) -> int:
    sizes: dict[int, int] = {}
    for entry in entries:
        size = int(torch.Size(entry.shape).numel()) * getattr(torch, entry.dtype).itemsize
        sizes[entry.place] = -(-size // 16) * 16
    return sum(sizes.values())
