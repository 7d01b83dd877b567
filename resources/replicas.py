"""A replica of the engine as the servers see it: it takes orders, and it may be lost."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from resources.failures import WorkerFailed
from resources.request_serving import Orders, Report, ServesRequests
from resources.worker_group import WorkerGroup


class ReplicaLost(RuntimeError):  # noqa: N818 - it says what happened, as WorkerFailed does
    """A replica's process died or stopped; what it had in hand goes elsewhere."""


class Replica(Protocol):
    """One engine."""

    name: str

    def send(self, orders: Orders) -> Callable[[], Report]:
        """Start a call; the function that comes back waits for its report. Both raise ReplicaLost."""
        ...

    def close(self) -> None:
        """Stop using it; it is not ended."""
        ...


class GroupReplica:
    """An engine that is a worker group of its own: one process, or the peers of a tensor-parallel engine."""

    def __init__(self, group: WorkerGroup, call_seconds: float) -> None:
        self.name, self.group, self._seconds = group.name, group, call_seconds

    def send(self, orders: Orders) -> Callable[[], Report]:
        """See Replica."""
        try:
            pending = self.group.submit("serve", orders, timeout=self._seconds)
        except WorkerFailed as error:
            raise ReplicaLost(f"replica {self.name}: {error}") from error
        return lambda: self._report(pending)

    def _report(self, pending: Any) -> Report:
        try:
            return pending.result()[0]
        except (WorkerFailed, TimeoutError) as error:
            raise ReplicaLost(f"replica {self.name}: {error}") from error

    def close(self) -> None:
        """Nothing to do."""


class LocalReplica:
    """An engine in this process, on a thread of its own."""

    def __init__(self, name: str, worker: ServesRequests) -> None:
        self.name, self.worker = name, worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"replica-{name}")

    def send(self, orders: Orders) -> Callable[[], Report]:
        """See Replica."""
        call = self._thread.submit(self.worker.serve, orders)
        return lambda: self._report(call)

    def _report(self, call: "Future[Report]") -> Report:
        try:
            return call.result()
        except Exception as error:  # an engine may raise anything, and has requests in hand that nobody else knows of
            raise ReplicaLost(f"replica {self.name}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


__all__ = ["GroupReplica", "LocalReplica", "Replica", "ReplicaLost"]
