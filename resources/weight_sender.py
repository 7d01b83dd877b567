"""The actor's end of a weight sync: methods for a worker that can export its weights in buckets."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from resources.batch import make_shard, ragged_from_values
from resources.dispatch import Dispatch, dispatch
from resources.rendezvous import host_store
from resources.weight_buckets import num_bytes, pack
from resources.weight_channel import SENDER, HasWeightChannel

_GOLDEN_RATIO = 0.6180339887498949

HOST = torch.device("cpu")
Bucket = list[tuple[str, Tensor]]


class ExportsWeights(Protocol):
    """What a worker brings along. With several ranks every method is a collective: all ranks call it together."""

    def export_weights(self, bucket_bytes: int, wire_dtype: str | None) -> Iterator[Bucket]:
        """Buckets of (name, whole tensor) in the wire dtype; a tied head comes as a second name of the same tensor."""
        ...

    def expected_names(self) -> list[str]:
        """Every name `export_weights` sends."""
        ...

    def compute_log_probs(self, rows: TensorDictBase, temperature: float) -> tuple[dict[str, Any], TensorDict]:
        """Adds `old_log_probs`."""
        ...


class SendsWeights(HasWeightChannel):
    """Mixin of the actor worker, an `ExportsWeights`. Only rank 0's buckets travel; the others gather along."""

    _weight_export: Iterator[Bucket] | None = None
    _weight_store: Any = None

    @dispatch(Dispatch.BROADCAST)
    def weight_names(self: Any) -> list[str]:
        """Every name an export sends."""
        return self.expected_names()

    @dispatch(Dispatch.BROADCAST)
    def begin_weight_export(self: Any, bucket_bytes: int, wire_dtype: str) -> list[str]:
        """Open a new export and give the names it will send."""
        self._weight_export = self.export_weights(bucket_bytes, wire_dtype)
        return self.expected_names()

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def next_weight_bucket(self: Any) -> tuple[dict[str, Any], list[Tensor] | None]:
        """The next bucket: status with its `entries` and `num_bytes`, and the tensors; no entries when all are out."""
        if self._weight_export is None:
            raise RuntimeError("no weight export is open; call begin_weight_export first")
        bucket = next(self._weight_export, [])
        if not bucket:
            self._weight_export = iter(())  # whoever asks ahead hears of the end more than once
        if int(os.environ.get("RANK", "0")) != 0:
            return {"entries": [], "num_bytes": 0}, None
        entries, tensors = pack(bucket, HOST)  # the object store holds host memory
        return {"entries": [entry.to_json() for entry in entries], "num_bytes": num_bytes(tensors)}, tensors

    @dispatch(Dispatch.BROADCAST)
    def end_weight_export(self: Any) -> None:
        """Drop an export that will not be finished."""
        self._weight_export = None

    @dispatch(Dispatch.RANK_ZERO)
    def host_weight_channel(self: Any, node_ip: str, num_receivers: int, timeout_seconds: float) -> tuple[str, int]:
        """Open the meeting point of a channel; sender and receivers then join it by the address returned."""
        self._weight_store, address = host_store(node_ip, num_receivers + 1, timeout_seconds)
        return address

    @dispatch(Dispatch.RANK_ZERO)
    def join_weight_channel(self: Any, host: str, port: int, num_receivers: int, timeout_seconds: float) -> None:
        """Rank 0 meets the receivers; returns when all are there."""
        self._open_channel(host, port, SENDER, num_receivers, timeout_seconds)

    @dispatch(Dispatch.BROADCAST)
    def broadcast_weights(self: Any, bucket_bytes: int, wire_dtype: str) -> int:
        """Send all weights through the channel; gives the bytes sent. The receivers run `receive_weight_broadcast`."""
        is_sender = int(os.environ.get("RANK", "0")) == 0
        sent = 0
        try:
            for bucket in self.export_weights(bucket_bytes, wire_dtype):
                if is_sender:
                    entries, tensors = pack(bucket, self._weight_channel.device)
                    self._weight_channel.send(entries, tensors)
                    sent += num_bytes(tensors)
            if is_sender:
                self._weight_channel.finish()
        except BaseException:
            self._close_channel()
            raise
        return sent

    @dispatch(Dispatch.BROADCAST)
    def probe_weights(self: Any, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of each token under the actor's weights; 0.0 for the first."""
        _, scored = self.compute_log_probs(probe_rows(token_ids), 1.0)
        return scored.get("old_log_probs").values().tolist()


def probe_tokens(vocab_size: int, length: int = 8) -> list[int]:
    """A fixed sequence that touches embeddings from all over the vocabulary.

    >>> probe_tokens(100, 4)
    [61, 23, 85, 47]
    """
    # Multiples of the golden ratio, modulo 1, spread evenly over the vocabulary.
    return [int((place * _GOLDEN_RATIO % 1.0) * vocab_size) for place in range(1, length + 1)]


def probe_rows(token_ids: Sequence[int]) -> TensorDict:
    """A batch of one row whose first token is the prompt and the rest the response."""
    length = torch.tensor([len(token_ids)])
    mask = torch.ones(len(token_ids), dtype=torch.bool)
    mask[0] = False
    return make_shard(
        {
            "row_ids": torch.tensor([0]),
            "group_ids": torch.tensor([0]),
            "prompt_lengths": torch.tensor([1]),
            "response_lengths": length - 1,
            "input_ids": ragged_from_values(torch.tensor(list(token_ids)), length),
            "response_mask": ragged_from_values(mask, length),
        }
    )
