"""The pool-bound task runner: a step runs in the task host of its role's pool, inside that pool's placement group.

It is prefect-ray's `RayTaskRunner` with another way to submit: no function is exported per task, no settings and no
flow parameters are shipped, Ray re-runs nothing, and a host's death names pool and step.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from prefect.client.schemas.objects import RunInput, State
from prefect.context import FlowRunContext, TagsContext
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Crashed
from prefect.tasks import Task
from prefect.utilities.collections import visit_collection
from prefect_ray.task_runners import PrefectRayFuture, RayTaskRunner
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from resources.telemetry.spans import Collect, Dispatch, RankSpan, TaskSpan, Waits
from tasks.call import FlowRunFacts, TaskCall, Upstream, decode, encode, reference_to
from tasks.hosts import HostLostError, HostSet
from tasks.step import StepResult

_BOUND: list[HostSet] = []


@contextlib.contextmanager
def bind_hosts(hosts: HostSet) -> Iterator[HostSet]:
    """Flows that run inside the block with a `PoolTaskRunner` use these hosts."""
    _BOUND.append(hosts)
    try:
        # A subflow otherwise ends with up to a second of waiting for its heartbeat thread.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield hosts
    finally:
        _BOUND.remove(hosts)


@dataclass(kw_only=True, slots=True)
class _Submission:
    """What the controller measured of one call."""

    task: str
    role: str
    pool: str
    upstream: tuple["StepFuture", ...]
    submitted: float
    clock_offset: float
    """Of the host's clock against the controller's."""
    serialize_seconds: float = 0.0
    put_seconds: float = 0.0
    bytes: int = 0


class StepFuture(PrefectRayFuture[StepResult]):
    """The outcome of a submitted step. `result()` raises the step's own error, or HostLostError when its host died."""

    def __init__(self, task_run_id: Any, wrapped_future: Any, timing: Any, submission: _Submission) -> None:
        super().__init__(task_run_id=task_run_id, wrapped_future=wrapped_future)
        self._timing_ref = timing
        self._submission = submission
        self._span: TaskSpan | None = None
        self._collected = (0.0, 0)

    @property
    def task_name(self) -> str:
        return self._submission.task

    @property
    def pool(self) -> str:
        return self._submission.pool

    @property
    def submitted(self) -> float:
        """When the flow submitted the step, on the controller's monotonic clock."""
        return self._submission.submitted

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the step ended, however it did, or `timeout` seconds passed."""
        if self._final_state is not None:
            return
        try:
            data = ray.get(self.wrapped_future, timeout=timeout)
        except GetTimeoutError:
            return
        except RayError as error:
            self._final_state = self._crashed(error)
            return
        begun = time.monotonic()
        self._final_state = decode(data)
        self._collected = (time.monotonic() - begun, len(data))

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        self.wait(timeout)
        if self._final_state is None:
            raise TimeoutError(f"step {self.task_name!r} in pool {self.pool!r} did not end within {timeout:g} s")
        if self._final_state.is_crashed() and isinstance(self._final_state.data, HostLostError) and raise_on_failure:
            raise self._final_state.data
        return self._final_state.result(raise_on_failure=raise_on_failure, _sync=True)  # pyright: ignore[reportCallIssue]

    def span(self) -> TaskSpan | None:
        """What was measured of the step, without its iteration; None while it runs or when its host died."""
        if self._span is None and self._final_state is not None:
            try:
                timing: Any = ray.get(self._timing_ref, timeout=5.0)
            except RayError:
                return None
            self._span = _span_of(self._submission, timing, self._collected)
        return self._span

    def _crashed(self, error: RayError) -> State[Any]:
        dead = [one for one in self._submission.upstream if one.state.is_crashed()]
        if dead:
            cause: Exception = HostLostError(
                f"step {self.task_name!r} did not run: {dead[0].task_name!r} before it crashed: {dead[0].state.message}"
            )
        elif isinstance(error, RayActorError):
            cause = HostLostError(
                f"step {self.task_name!r}: the task host of pool {self.pool!r} died: {_first_lines(error)}"
            )
        else:
            cause = HostLostError(f"step {self.task_name!r} in pool {self.pool!r}: {_first_lines(error)}")
        return Crashed(message=str(cause), data=cause)


class PoolTaskRunner(RayTaskRunner[Any]):
    """Runs steps in the task hosts that `start_hosts` (or `bind_hosts`) made current, or in those given.

    Ray must be initialised before; a runner that starts Ray would also end it with the flow, workers and all.
    """

    def __init__(self, hosts: HostSet | None = None) -> None:
        super().__init__()
        self._given = hosts
        self.futures: list[StepFuture] = []

    def duplicate(self) -> "PoolTaskRunner":
        return type(self)(self._given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolTaskRunner) and self._given is other._given

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as for every Prefect runner

    @property
    def hosts(self) -> HostSet:
        """Raises RuntimeError where there are none."""
        if self._given is not None:
            return self._given
        if not _BOUND:
            raise RuntimeError("no task hosts: run the flow inside `with start_hosts(...)`, which makes one per pool")
        return _BOUND[-1]

    def __enter__(self) -> "PoolTaskRunner":
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised; connect to a cluster before a flow runs with PoolTaskRunner")
        _ = self.hosts
        return super().__enter__()  # pyright: ignore[reportReturnType]

    def submit(
        self,
        task: "Task[Any, Any]",
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> StepFuture:
        """Send a step to its pool's host. Raises ValueError for a task without a role, or of a role without a pool."""
        if not self._started:
            raise RuntimeError("the task runner was not started; submit steps from inside a flow")
        pool = self.hosts.pool_of(task)
        submitted = time.monotonic()
        upstream: list[StepFuture] = []
        plain = {name: _exchange(value, upstream) for name, value in parameters.items()}
        waits = tuple(_exchange(one, upstream) for one in wait_for or ())
        task_run_id = uuid4()
        call = TaskCall(
            task=reference_to(task),
            task_run_id=task_run_id,
            flow_run=_flow_run_facts(),
            parameters=plain,
            wait_for=waits,
        )
        data = encode(call)
        encoded = time.monotonic()
        offset = self.hosts.clock_offset(pool).seconds
        run: Any = self.hosts.host_of(pool).run
        state, timing = run.remote(*(one.wrapped_future for one in upstream), call=data)
        submission = _Submission(
            task=task.name,
            role=getattr(task, "role", ""),
            pool=pool,
            upstream=tuple(upstream),
            submitted=submitted,
            clock_offset=offset,
            serialize_seconds=encoded - submitted,
            put_seconds=time.monotonic() - encoded,
            bytes=len(data),
        )
        future = StepFuture(task_run_id, state, timing, submission)
        self.futures.append(future)
        return future


ON_POOLS: Any = PoolTaskRunner()
"""`@flow(task_runner=ON_POOLS)`: the hosts that are current when the flow runs."""


def pool_runner() -> Any:
    """A `PoolTaskRunner` for `@flow(task_runner=...)`, whose type is invariant in the kind of future."""
    return PoolTaskRunner()


def _exchange(value: Any, upstream: list[StepFuture]) -> Any:
    """`value` with each step future replaced by its place in `upstream`, where Ray resolves it."""

    def place(item: Any, /) -> Any:
        if not isinstance(item, PrefectFuture):
            return item
        if not isinstance(item, StepFuture):
            raise TypeError(f"{item!r} is a future of another task runner; pass its result")
        if item not in upstream:
            upstream.append(item)
        return Upstream(upstream.index(item))

    return visit_collection(value, visit_fn=place, return_data=True)


def _flow_run_facts() -> FlowRunFacts | None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    run, tags = context.flow_run, TagsContext.get()
    return FlowRunFacts(
        id=run.id,
        flow_id=run.flow_id,
        name=run.name,
        run_count=run.run_count,
        deployment_id=run.deployment_id,
        tags=tuple(sorted({*run.tags, *tags.current_tags})),
    )


def _span_of(sent: _Submission, timing: Mapping[str, Any], collected: tuple[float, int]) -> TaskSpan:
    """The step on the controller's clock: its ranks tell theirs on it, and its host what it found on its own."""
    ranks = tuple(RankSpan.from_json(rank) for rank in timing["ranks"])
    ends = [span.ended for one in sent.upstream if (span := one.span()) is not None]
    return TaskSpan(
        iteration=0,
        task=sent.task,
        role=sent.role,
        pool=sent.pool,
        node=timing["node"],
        submitted=sent.submitted,
        started=timing["started"] - sent.clock_offset,
        ended=timing["ended"] - sent.clock_offset,
        upstream=tuple(one.task_name for one in sent.upstream),
        waits=Waits(
            upstream=max(0.0, max(ends, default=sent.submitted) - sent.submitted),
            weights=max((float(rank.facts.get("weights_seconds", 0.0)) for rank in ranks), default=0.0),
            queue=max((rank.queue_seconds for rank in ranks), default=0.0),
        ),
        dispatch=Dispatch(
            serialize_seconds=sent.serialize_seconds,
            put_seconds=sent.put_seconds,
            unpack_seconds=timing["unpack_seconds"],
            bytes=sent.bytes,
        ),
        collect=Collect(seconds=timing["collect_seconds"] + collected[0], bytes=timing["collect_bytes"]),
        ranks=ranks,
    )


def _first_lines(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
