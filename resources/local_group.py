"""Worker groups whose workers live in this process: the calls of a `WorkerGroup`, without Ray.

For tests, studies and benchmarks, where one process plays the whole cast. A call runs at once, when it is submitted.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from resources.call_plan import join_answers, plan_call
from resources.dispatch import MethodInfo, Topology, marked_methods
from resources.ranks import Mesh
from resources.splitting import is_stored_rows, is_tensordict


class LocalCall:
    """A call that has been made."""

    def __init__(
        self, topology: Topology, method: MethodInfo, answers: list[Any], spans: list[dict[str, float]]
    ) -> None:
        self._topology, self._method, self._answers = topology, method, answers
        self.spans = spans

    def is_done(self) -> bool:
        """Always."""
        return True

    def result(self) -> Any:
        """The joined answers."""
        return join_answers(self._method, self._topology, self._answers)


class LocalGroup:
    """The workers of one role in this process, in rank order; plain objects that may also be used directly."""

    incarnation = 1
    failure = None
    pool = "local"
    clock_offset = 0.0
    call_seconds = 600.0

    def __init__(self, role: str, workers: Sequence[Any], mesh: Mesh | None = None) -> None:
        self.role = self.name = role
        self.workers = list(workers)
        self.topology = Topology(role=role, world_size=len(self.workers), mesh=mesh or Mesh())
        self._methods = marked_methods(type(self.workers[0]))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Rank, node and pid of every worker: all of them this process."""
        return [
            {"rank": rank, "node": "local", "node_id": "local", "pid": os.getpid(), "log_file": ""}
            for rank in range(self.world_size)
        ]

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        return self.submit(method, *args, timeout=timeout, **kwargs).result()

    def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> LocalCall:
        """Make the call, rank after rank. Raises what the worker raises."""
        del timeout  # nothing could interrupt this thread
        info = self._methods.get(method)
        if info is None:
            raise ValueError(f"role {self.role} has no dispatched method {method!r}; it has {sorted(self._methods)}")
        plan = plan_call(info, self.topology, args, kwargs, lambda value: value)
        answers: list[Any] = []
        spans: list[dict[str, float]] = []
        for rank, ((own, named), answering) in enumerate(zip(plan.arguments, plan.answering, strict=True)):
            start = time.monotonic()
            worker: Any = getattr(self.workers[rank], method)
            value = worker(*(_loaded(one) for one in own), **{name: _loaded(one) for name, one in named.items()})
            end = time.monotonic()
            spans.append(
                {"rank": rank, "queue_seconds": 0.0, "execute_seconds": end - start, "start": start, "end": end}
            )
            if answering:
                answers.append(_told(value, spans[-1]) if info.marking.bulk else value)
        return LocalCall(self.topology, info, answers, spans)

    def shutdown(self) -> None:
        """Nothing to end."""


def make_siblings(workers: Mapping[str, Any]) -> None:
    """Let workers (by role) reach each other, as fused roles of one process do."""
    for worker in workers.values():
        worker.siblings = dict(workers)


def _loaded(value: Any) -> Any:
    return value.load() if is_stored_rows(value) else value


def _told(value: tuple[dict[str, Any], Any], span: Mapping[str, float]) -> tuple[dict[str, Any], Any]:
    """What a worker process adds to the status of a bulk method."""
    status, data = value
    reply = {**status, "span": span}
    if is_tensordict(data) and "row_ids" in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        reply["shard"] = {"row_ids": data["row_ids"].tolist(), "columns": sorted(data.keys())}
    return reply, data
