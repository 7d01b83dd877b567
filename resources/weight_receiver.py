"""The engine's end of a weight sync: methods for a worker that holds an engine."""

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray
from torch import Tensor

from resources.dispatch import Dispatch, dispatch
from resources.engines.base import Engine, WeightReport
from resources.weight_buckets import WeightEntry, num_bytes, unpack
from resources.weight_channel import SENDER, HasWeightChannel


class BucketRef:
    """Where a bucket's tensors lie: a Ray ObjectRef, or the tensors themselves within one process.

    A plain class on purpose: what passes it on must not look inside and fetch.
    """

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce__(self) -> tuple[type["BucketRef"], tuple[Any]]:
        return (BucketRef, (self.data,))

    def tensors(self) -> list[Tensor]:
        """Fetch; on the same node these are views of shared memory, which nobody may write."""
        return ray.get(self.data) if isinstance(self.data, ray.ObjectRef) else self.data


class ReceivesWeights(HasWeightChannel):
    """Mixin of the rollout worker: `engine` and `siblings` come from the worker."""

    engine: Engine
    siblings: dict[str, Any]
    rank_offset: int = 0
    """Ranks of the replicas before this one, where each is a worker group of its own."""
    _is_asleep: bool = False
    """Whether the engine has given its accelerator's memory back."""
    _weights_started: float = 0.0
    _weights_ended: float | None = None

    @dispatch(Dispatch.BROADCAST)
    def begin_weights(self) -> None:
        """Open the engine for new weights; nothing is sampled until `finish_weights`."""
        self._open()

    @dispatch(Dispatch.BROADCAST)
    def load_weight_bucket(self, entries: Sequence[dict[str, Any]], bucket: BucketRef) -> None:
        """Check and load one bucket. Raises WeightMismatchError."""
        self.engine.load_weights(unpack([WeightEntry.from_json(entry) for entry in entries], bucket.tensors()))

    @dispatch(Dispatch.BROADCAST)
    def finish_weights(self, version: int, names: Collection[str], probe: Sequence[int]) -> dict[str, Any]:
        """Put the weights in force. Gives the report, with the engine's log-probs of the probe tokens."""
        return self._report(self.engine.finish_update(version, names), probe)

    @dispatch(Dispatch.BROADCAST)
    def join_weight_channel(self, host: str, port: int, num_receivers: int, timeout_seconds: float) -> None:
        """Meet the sender and the other engines; returns when all are there."""
        rank = SENDER + 1 + self.rank_offset + int(os.environ.get("RANK", "0"))
        self._open_channel(host, port, rank, num_receivers, timeout_seconds)

    @dispatch(Dispatch.BROADCAST)
    def receive_weight_broadcast(self, version: int, names: Collection[str], probe: Sequence[int]) -> dict[str, Any]:
        """Take all weights from the channel and put them in force; the sender runs `broadcast_weights`."""
        if self._weight_channel is None:
            raise RuntimeError("no weight channel is open; call join_weight_channel first")
        is_done = False
        try:
            self._open()
            for entries, tensors in self._weight_channel.receive():
                self.engine.load_weights(unpack(entries, tensors))
            is_done = True
        finally:
            if not is_done:
                self._close_channel()
        return self._report(self.engine.finish_update(version, names), probe)

    @dispatch(Dispatch.BROADCAST)
    def receive_from_sibling(
        self, version: int, bucket_bytes: int, wire_dtype: str, probe: Sequence[int]
    ) -> dict[str, Any]:
        """Take the weights of the actor in this very process: no copy on the way, so no checksum either.

        All ranks of the fused group call it together, since gathering the actor's weights is collective.
        """
        actor = self.siblings.get("actor")
        if actor is None:
            raise RuntimeError(
                f"no actor lives in this process (roles here: {sorted(self.siblings)}); set weight_sync to object_store"
            )
        copied = 0
        self._open()
        for bucket in actor.export_weights(bucket_bytes, wire_dtype):
            self.engine.load_weights(bucket)
            copied += num_bytes(list({id(tensor): tensor for _, tensor in bucket}.values()))
        report = self._report(self.engine.finish_update(version, actor.expected_names()), probe)
        return {**report, "num_bytes": copied, "actor_probe": actor.probe_weights(probe) if report["probe"] else []}

    @dispatch(Dispatch.BROADCAST)
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of each token under the engine's own weights; 0.0 for the first.

        Empty for an engine without a model.
        """
        return self.engine.score(token_ids)

    def weights_facts(self, started: float) -> dict[str, float]:
        """Of the last sync, for the span of what is sampled from `started` on; empty for an engine's first weights."""
        if self._weights_ended is None:
            return {}
        return {
            "weights_seconds": self._weights_ended - self._weights_started,
            "weights_age_seconds": started - self._weights_ended,
        }

    def _open(self) -> None:
        self._weights_started = time.monotonic()
        self._wake_engine()
        self.engine.begin_update()

    def _wake_engine(self) -> None:
        if self._is_asleep:
            self.engine.wake()
            self._is_asleep = False

    def _rest_engine(self) -> None:
        if not self._is_asleep:
            self.engine.sleep()
            self._is_asleep = True

    def _report(self, report: WeightReport, probe: Sequence[int]) -> dict[str, Any]:
        self._weights_ended = time.monotonic()
        return {
            "version": report.version,
            "num_weights": len(report.names),
            "num_bytes": report.num_bytes,
            "seconds": report.seconds,
            "aliases": list(report.aliases),
            "probe": self.engine.score(probe),
            "finished": time.monotonic(),
        }
