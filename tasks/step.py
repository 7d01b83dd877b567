"""A step of the DAG: Prefect's task with our settings, written once, plus what it reads and adds.

The body runs in the task host of its role's pool; it reaches workers and data through `tasks.host.host()` and
returns a small `StepResult`. A step never caches, never persists, never retries and never carries a tag: an
optimizer step done twice is wrong, and a tagged task costs seconds on SQLite.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefect import Task
from prefect.cache_policies import NO_CACHE

from resources.store import BatchHandle
from resources.telemetry.spans import RankSpan
from tasks.stamp import Stamp

if TYPE_CHECKING:
    from tasks.runner import StepFuture


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gives back to the flow: names and numbers, never tensors.

    >>> StepResult(metrics={"actor/approx_kl": 0.01}).metrics["actor/approx_kl"]
    0.01
    """

    handle: BatchHandle | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON values for the controller (versions, paths, row counts); they do not become metrics."""
    spans: tuple[RankSpan, ...] = ()
    """What each rank measured; taken off in the task host and sent beside the result, not with it."""


class Step(Task[..., StepResult]):
    """A Prefect task that knows its role and its columns."""

    role: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    if TYPE_CHECKING:

        def submit(self, *args: Any, **kwargs: Any) -> "StepFuture":
            """Send the step to its pool's host; arguments may be futures of earlier steps, `wait_for` too."""
            ...

    def with_options(self, *args: Any, **kwargs: Any) -> "Step":
        changed: Any = super().with_options(*args, **kwargs)
        changed.__class__ = Step
        changed.role, changed.reads, changed.writes = self.role, self.reads, self.writes
        return changed


def step(
    *, role: str, name: str | None = None, reads: Iterable[str] = (), writes: Iterable[str] = ()
) -> Callable[[Callable[..., StepResult]], Step]:
    """Make a function a step of `role`.

    `name` is what the UI shows and defaults to the function's name with dashes. `reads` are the columns the body
    asks of its batch (a column is dropped after its last reader), `writes` those it adds. In the flow, pass the
    future of an earlier step as an argument: the body receives that step's `BatchHandle` (None if it made none).
    """

    def decorate(fn: Callable[..., StepResult]) -> Step:
        task_name = name or fn.__name__.replace("_", "-")
        made = Step(
            _body(fn, role),
            name=task_name,
            task_run_name=_run_name(task_name),
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=0,
            log_prints=False,
        )
        made.role, made.reads, made.writes = role, tuple(reads), tuple(writes)
        return made

    return decorate


def readers_of(steps: Iterable[Step]) -> dict[str, tuple[str, ...]]:
    """Column -> names of the steps that read it, for the store's table.

    >>> readers_of([])
    {}
    """
    table: dict[str, list[str]] = {}
    for one in steps:
        for column in one.reads:
            table.setdefault(column, []).append(one.name)
    return {column: tuple(names) for column, names in sorted(table.items())}


def _body(fn: Callable[..., StepResult], role: str) -> Callable[..., StepResult]:
    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> StepResult:
        from tasks.host import measure_body

        plain = [_handle_of(value) for value in args]
        named = {key: _handle_of(value) for key, value in kwargs.items()}
        with measure_body() as measured:
            result = fn(*plain, **named)
            if not isinstance(result, StepResult):
                raise TypeError(f"step {fn.__qualname__} returned {type(result).__name__}; a step returns a StepResult")
            if measured is None:
                return result
            # Most ranks are the role's own, and of a long run there are very many: nothing need say so.
            measured.ranks = tuple(replace(one, duty="") if one.duty == role else one for one in result.spans)
        return replace(result, spans=())

    return body


def _handle_of(value: Any) -> Any:
    """A step's result stands for its batch, alone or in a list."""
    if isinstance(value, StepResult):
        return value.handle
    if isinstance(value, list | tuple) and any(isinstance(item, StepResult) for item in value):
        return [_handle_of(item) for item in value]
    return value


def _run_name(task_name: str) -> Callable[..., str]:
    """Names a run `{task}/{pool}/v{policy_version}`: the version it is told, else that of its iteration, else none."""

    def name_of(parameters: Mapping[str, Any]) -> str:
        from tasks.host import current_pool

        at = parameters.get("at")
        version = parameters.get("policy_version", at.policy_version if isinstance(at, Stamp) else None)
        parts = [task_name, current_pool(), None if version is None else f"v{version}"]
        return "/".join(part for part in parts if part)

    return name_of
