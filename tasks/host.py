"""The task host: one Ray actor per pool, in bundle 0, that runs Prefect's engine and calls the pool's workers.

It keeps one Prefect client open (opening one per task costs 40 ms), owns the batch table and the handles of the
worker groups. It computes nothing: a step that needs CPU time asks a worker for it.
"""

import contextlib
import contextvars
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import EngineContext, SyncClientContext
from prefect.events.worker import EventsWorker
from prefect.results import ResultStore
from prefect.task_engine import run_task_sync
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.collections import visit_collection

from resources.cpu_features import multiplies_bfloat16
from resources.frozen_heap import freeze_heap
from resources.rows import Rows, ShardRef
from resources.served_group import ServedGroup, replicas_of
from resources.store import BatchHandle, BatchStore, StoreView
from resources.telemetry.spans import RankSpan
from tasks.api import hooked_clients
from tasks.call import FlowRunFacts, TaskCall, Upstream, decode, encode, resolve_task
from tasks.step import Step

MAX_CONCURRENT_STEPS = 8
"""More steps than that of one pool never run at a time: the DAG has nine."""


@dataclass(kw_only=True)
class HostContext:
    """What a step's body can reach; get it with `host()`."""

    pool: str
    run_id: str
    store: StoreView
    config: Any = None
    """The run's `RunConfig`."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Duty (actor, rollout, critic, ...) -> worker group."""
    served: tuple[Any, ServedGroup] | None = None
    """The rollout servers, with the incarnations of the replicas they were made of."""
    answered: float = field(default_factory=time.monotonic)
    """When a step of this process last got the answer to a call: the sign that a long one goes on."""

    def group(self, duty: str) -> Any:
        """Worker group that does `duty`. Raises LookupError naming those there are."""
        if duty == "rollout" and duty not in self.groups and replicas_of(self.groups):
            return self._served_rollout()
        if duty not in self.groups:
            raise LookupError(f"no worker group does {duty!r} in this run; there are {sorted(self.groups)}")
        return self.groups[duty]

    def _served_rollout(self) -> ServedGroup:
        """The replicas as one group; made anew when one of them came back under a new incarnation."""
        replicas = replicas_of(self.groups)
        key = tuple((name, group.incarnation) for name, group in sorted(replicas.items()))
        if self.served is None or self.served[0] != key:
            if self.served is not None:
                self.served[1].shutdown()
            self.served = (key, ServedGroup(self.config, replicas))
        return self.served[1]

    def pause_sampling(self, timeout: float) -> None:
        """Stop the rollout servers of this process, if there are any."""
        if self.served is not None:
            self.served[1].pause(timeout)

    def resume_sampling(self) -> None:
        """Undo `pause_sampling`."""
        if self.served is not None:
            self.served[1].resume()

    def read(
        self, *handles: BatchHandle | None, columns: Sequence[str] | None = None, wait_seconds: float = 0.0
    ) -> Rows:
        """The columns that the running step declared (or `columns`), by reference.

        Pass every handle whose columns are wanted; None is skipped, so an absent branch of the DAG needs no `if`.
        """
        named = [handle for handle in handles if handle is not None]
        current = _CURRENT.get()
        if columns is None:
            if current is None:
                raise ValueError("no step runs here, so no columns are declared; name them")
            columns = current.reads
        if current is not None:
            current.read_from.update((handle.pool, handle.batch_id) for handle in named)
        return self.store.rows(named, columns, wait_seconds)

    def add(self, batch: BatchHandle | str, shards: Sequence[ShardRef]) -> BatchHandle:
        """Put the workers' new columns into this pool's table.

        Raises ValueError for a column that the step did not declare.
        """
        current = _CURRENT.get()
        if current is not None:
            added = {column for shard in shards for column in shard.columns} - {"row_ids", "group_ids"}
            undeclared = sorted(added - set(current.writes))
            if undeclared:
                raise ValueError(
                    f"step {current.task!r} adds columns {undeclared} but declares writes={sorted(current.writes)}"
                )
        return self.store.own.add(batch if isinstance(batch, str) else batch.batch_id, shards)


@dataclass(kw_only=True)
class _Running:
    """The step that runs in this thread."""

    task: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    read_from: set[tuple[str, str]] = field(default_factory=set)
    started: float = 0.0
    ended: float = 0.0
    ranks: tuple[RankSpan, ...] = ()


_CURRENT: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("callsheet_step", default=None)
_HOST: list[HostContext] = []


def host() -> HostContext:
    """The context of the task host this process is. Raises RuntimeError anywhere else."""
    if not _HOST:
        raise RuntimeError(
            "this process is no task host; submit the step from a flow that runs with PoolTaskRunner, or use"
            " use_host() in a test"
        )
    return _HOST[-1]


def current_pool() -> str:
    """Pool of this task host; empty in any other process."""
    return _HOST[-1].pool if _HOST else ""


@contextlib.contextmanager
def use_host(context: HostContext) -> Iterator[HostContext]:
    """Let `host()` return `context`, so that a step's body (`step.fn`) runs in this process without Prefect and Ray."""
    _HOST.append(context)
    try:
        yield context
    finally:
        _HOST.pop()


def call_step(task: Step, *args: Any, **kwargs: Any) -> Any:
    """Run the body of a step in this process, under `use_host`: the columns it declares count, Prefect is left out."""
    token = _CURRENT.set(_Running(task=task.name, reads=task.reads, writes=task.writes))
    try:
        return task.fn(*args, **kwargs)
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def measure_body() -> Iterator[_Running | None]:
    """Time the body of the running step; yields None where no task host called it."""
    current = _CURRENT.get()
    if current is None:
        yield None
        return
    current.started = time.monotonic()
    try:
        yield current
    finally:
        current.ended = time.monotonic()


_remote_step: Any = ray.method(concurrency_group="steps", num_returns=2)
"""Typed Any: Ray's stubs know no variadic methods."""


class TaskHost:
    """The Ray actor; `tasks.hosts.start_hosts` makes it."""

    def __init__(
        self, pool: str, run_id: str, config: Any, readers: Mapping[str, Sequence[str]], incarnation: int
    ) -> None:
        self._context = HostContext(
            pool=pool, run_id=run_id, config=config, store=StoreView(BatchStore(pool, readers, incarnation))
        )
        _HOST.append(self._context)
        # Kept for life: a client per task costs two TLS contexts, and a result store resolves its storage anew.
        with hooked_clients():
            self._client = SyncClientContext()
        self._client.client.__enter__()
        self._results = ResultStore()

    @_remote_step
    def run(self, *upstream: bytes, call: bytes) -> tuple[bytes, dict[str, Any]]:
        """Run one task; returns (its final Prefect state, encoded; its timing, `started` and `ended` by this clock)."""
        received = time.monotonic()
        spec: TaskCall = decode(call)
        task = resolve_task(spec.task)
        states: list[State[Any]] = [decode(item) for item in upstream]
        parameters = visit_collection(
            dict(spec.parameters),
            visit_fn=lambda value: states[value.index] if isinstance(value, Upstream) else value,
            return_data=True,
        )
        unpacked = time.monotonic()
        is_step = isinstance(task, Step)
        running = _Running(task=task.name, reads=task.reads if is_step else (), writes=task.writes if is_step else ())
        token = _CURRENT.set(running)
        try:
            state = self._run_engine(task, spec, parameters, [states[place.index] for place in spec.wait_for])
        finally:
            _CURRENT.reset(token)
        if state.is_completed():
            self._context.store.release(
                (BatchHandle(pool=pool, batch_id=batch) for pool, batch in running.read_from), task.name
            )
        ended = time.monotonic()
        outcome = _encode_state(state)
        timing = {
            "node": ray.util.get_node_ip_address(),
            "unpack_seconds": unpacked - received,
            "started": running.started or received,
            "ended": running.ended or ended,
            "collect_seconds": time.monotonic() - ended,
            "collect_bytes": len(outcome),
            "ranks": [rank.to_json() for rank in running.ranks],
        }
        return outcome, timing

    def _run_engine(
        self, task: Any, spec: TaskCall, parameters: dict[str, Any], wait_for: list[State[Any]]
    ) -> State[Any]:
        client_token = SyncClientContext.__var__.set(self._client)
        try:
            with self._flow_context(spec.flow_run):
                state: Any = run_task_sync(
                    task=task,
                    task_run_id=spec.task_run_id,
                    parameters=parameters,
                    wait_for=wait_for,
                    return_type="state",
                )
                return state
        finally:
            SyncClientContext.__var__.reset(client_token)

    @contextlib.contextmanager
    def _flow_context(self, facts: FlowRunFacts | None) -> Iterator[None]:
        if facts is None:
            yield
            return
        flow_run = FlowRun(
            id=facts.id,
            flow_id=facts.flow_id,
            name=facts.name,
            run_count=facts.run_count,
            tags=list(facts.tags),
            deployment_id=facts.deployment_id,
        )
        context = EngineContext(
            flow_run=flow_run,
            client=self._client.client,
            task_runner=ThreadPoolTaskRunner(),
            result_store=self._results,
            persist_result=False,
            log_prints=False,
            detached=True,
        )
        with context:
            yield

    def attach(self, groups: Mapping[str, Any]) -> None:
        """Give the steps of this host these worker groups (by duty) for all that it had."""
        self._context.groups = dict(groups)

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Handles of the other pools' hosts, whose tables this one may read."""
        self._context.store.peers = {pool: peer for pool, peer in peers.items() if pool != self._context.pool}
        freeze_heap()

    @ray.method(concurrency_group="table")
    def lookup(self, batch_id: str, columns: Sequence[str]) -> Any:
        """For another host: what this pool's table has of a batch (see `BatchStore.lookup`)."""
        return self._context.store.own.lookup(batch_id, columns)

    @ray.method(concurrency_group="table")
    def release(self, batch_id: str, step: str) -> None:
        """For another host: `step` has read its columns."""
        self._context.store.own.release(batch_id, step)

    @ray.method(concurrency_group="table")
    def drop(self, batch_id: str) -> None:
        """Forget a batch."""
        self._context.store.own.drop(batch_id)

    @ray.method(concurrency_group="table")
    def batch_ids(self) -> tuple[str, ...]:
        return self._context.store.own.batch_ids()

    @ray.method(concurrency_group="table")
    def pause_sampling(self, timeout: float) -> None:
        """For another host, which brings new weights."""
        self._context.pause_sampling(timeout)

    @ray.method(concurrency_group="table")
    def resume_sampling(self) -> None:
        """See `pause_sampling`."""
        self._context.resume_sampling()

    @ray.method(concurrency_group="table")
    def clock(self) -> float:
        """The monotonic clock of this node, for its offset against the controller's."""
        return time.monotonic()

    @ray.method(concurrency_group="table")
    def quiet_seconds(self) -> float:
        """Since a step here got an answer of a worker group, or the rollout servers here one of an engine."""
        served = self._context.served
        return time.monotonic() - max(self._context.answered, 0.0 if served is None else served[1].answered)

    def facts(self) -> dict[str, Any]:
        """Who this is: process, node and its open Prefect client's address."""
        return {
            "pid": os.getpid(),
            "cores": len(os.sched_getaffinity(0)),
            "multiplies_bfloat16": multiplies_bfloat16(),
            "node": ray.util.get_node_ip_address(),
            "incarnation": self._context.store.own.incarnation,
            "api_url": str(self._client.client.api_url),
        }

    def flush(self) -> None:
        """Send the task events that still wait, so that every row is recorded."""
        EventsWorker.drain_all()


def _encode_state(state: State[Any]) -> bytes:
    """A state whose exception does not survive pickling would be lost with it; the exception's text is kept instead."""
    if state.is_completed():
        return encode(state)
    try:
        data = encode(state)
        decode(data)  # exceptions with constructors of their own often pickle but do not come back
        return data
    except Exception as error:  # noqa: BLE001 - a user's exception class may raise anything while it is copied
        text = f"{state.message} (the exception itself does not pickle: {error})"
        return encode(state.model_copy(update={"data": RuntimeError(text)}))
