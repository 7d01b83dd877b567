"""Calling a worker group from a step: answers, the columns that stay with the workers, metrics, and spans."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resources.rows import ShardRef
from resources.store import BatchHandle
from resources.telemetry.spans import RankSpan
from tasks.algorithms.diagnostics import MAX, finish_metrics
from tasks.host import host
from tasks.step import StepResult


@dataclass(frozen=True, kw_only=True)
class Replies:
    """What the ranks of one call answered, in rank order."""

    statuses: Sequence[Mapping[str, Any]]
    data: Sequence[Any] = ()
    """References of bulk results; empty for a method without."""
    spans: tuple[RankSpan, ...] = ()

    @property
    def sums(self) -> dict[str, float]:
        """Metrics as sums and counts over all ranks."""
        return add_sums(status.get("metrics", {}) for status in self.statuses)

    @property
    def shards(self) -> list[ShardRef]:
        """The columns the workers made, by reference."""
        return [
            ShardRef(data, tuple(status["shard"]["row_ids"]), tuple(status["shard"]["columns"]))
            for status, data in zip(self.statuses, self.data, strict=True)
        ]

    def agreed(self, name: str) -> Any:
        """What every rank says of `name`, which each found out on its own.

        Raises ValueError when two ranks differ: taking one rank's word would let the others go on from elsewhere.
        """
        told = [status[name] for status in self.statuses]
        for rank, value in enumerate(told):
            if value != told[0]:
                raise ValueError(
                    f"ranks disagree on {name}: rank 0 says {told[0]!r} and rank {rank} {value!r}; they read other "
                    "data or settings, so give every node the same files"
                )
        return told[0]

    def result(self, handle: BatchHandle | None = None, **facts: Any) -> StepResult:
        """The step's result: finished metrics and spans beside the handle."""
        return StepResult(handle=handle, metrics=finish_metrics(self.sums), facts=facts, spans=self.spans)

    def keep(self, batch: BatchHandle | str, **facts: Any) -> StepResult:
        """Put the new columns into this pool's table, and give the step's result."""
        return self.result(host().add(batch, self.shards), **facts)


@dataclass(kw_only=True)
class Call:
    """A call on its way to the ranks of `duty`."""

    duty: str
    pending: Any
    is_bulk: bool
    nodes: dict[int, str] = field(default_factory=dict)

    def wait(self) -> Replies:
        """The answers of all ranks. Raises WorkerFailed or CallTimeout."""
        answers = self.pending.result()
        host().answered = time.monotonic()
        if not isinstance(answers, list):
            answers = [answers]
        statuses = [answer[0] for answer in answers] if self.is_bulk else [answer or {} for answer in answers]
        details = {detail.get("rank"): detail for detail in (status.get("spans", {}) for status in statuses)}
        spans = tuple(
            _rank_span(span, details.get(span["rank"], {}), self.nodes.get(int(span["rank"]), ""))
            for span in self.pending.spans
        )
        data = [answer[1] for answer in answers] if self.is_bulk else []
        return Replies(statuses=statuses, data=data, spans=tuple(replace(span, duty=self.duty) for span in spans))


def send(duty: str, method: str, *args: Any, is_bulk: bool = False, **kwargs: Any) -> Call:
    """Start a call on the worker group of `duty`, without waiting."""
    group = host().group(duty)
    nodes = {rank["rank"]: rank["node"] for rank in group.ranks}
    return Call(duty=duty, pending=group.submit(method, *args, **kwargs), is_bulk=is_bulk, nodes=nodes)


def call(duty: str, method: str, *args: Any, is_bulk: bool = False, **kwargs: Any) -> Replies:
    """Call the worker group of `duty` and wait for all ranks."""
    return send(duty, method, *args, is_bulk=is_bulk, **kwargs).wait()


def add_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge sums and counts of ranks: they add up, maxima are compared. A nan of any rank stays one.

    >>> add_sums([{"x": 1.0, "x/count": 2.0, "y/max": 3.0}, {"x": 4.0, "x/count": 1.0, "y/max": 2.0}])
    {'x': 5.0, 'x/count': 3.0, 'y/max': 3.0}
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = float(value)
            elif name.endswith(MAX) and not math.isnan(value):
                total[name] = max(total[name], value)
            else:
                total[name] = total[name] + value  # A nan makes one of whatever was there.
    return total


_WIRE = ("rank", "start", "end", "queue_seconds")


def _rank_span(wire: Mapping[str, float], worker: Mapping[str, Any], node: str) -> RankSpan:
    """Times as the wire tells them, by the controller's clock for all ranks, and what the worker itself knows."""
    own = {name: value for name, value in worker.items() if name not in (*_WIRE, "execute_seconds", "node")}
    return RankSpan.from_json({**own, **{name: wire[name] for name in _WIRE}, "rank": int(wire["rank"]), "node": node})
