"""What the steps of one subflow gave back, joined."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.runtime import flow_run

from resources.telemetry.facts import FACTS
from resources.telemetry.spans import IterationSpan, TaskSpan
from tasks.collect import collect, payload_bytes, spans_of
from tasks.runner import StepFuture
from tasks.stamp import Stamp
from tasks.step import StepResult

Submitted = StepFuture | StepResult
"""A step on its way, or the result of one that an earlier iteration submitted."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Metrics, facts and spans of a subflow's steps."""

    at: Stamp
    metrics: dict[str, float]
    facts: dict[str, dict[str, Any]]
    """Step name -> its facts."""
    span: IterationSpan
    spans: Sequence[TaskSpan] = field(default=(), repr=False)
    ahead: tuple[StepResult, ...] = field(default=(), repr=False)
    """Rollouts of later iterations, in order."""
    flow_run_id: UUID | None = None


def gather(
    at: Stamp,
    submitted: Sequence[Submitted],
    ahead: Sequence[StepFuture] = (),
    *,
    since: float | None = None,
    deadline_seconds: float,
    check: Callable[[], None],
    quiet_seconds: Callable[[], float] | None = None,
) -> Outcome:
    """Wait for all steps of a subflow, the first failure first.

    `since`: when the subflow before it was over. The iteration counts from there, so that the time between two
    subflows (commit, snapshot, Prefect) is part of a step; from its first submission where there was none before.
    `deadline_seconds`, `quiet_seconds`: longest without progress, however long all of it takes; see `collect`.
    Raises StepFailedError, HostLostError, TimeoutError, and whatever `check` raises (a cancelled run).
    """
    first = min((one.submitted for one in submitted if isinstance(one, StepFuture)), default=time.monotonic())
    futures = [one for one in submitted if isinstance(one, StepFuture)]
    results = iter(collect([*futures, *ahead], deadline_seconds, check, quiet_seconds))
    metrics: dict[str, float] = {}
    facts: dict[str, dict[str, Any]] = {}
    for one in submitted:
        result = next(results) if isinstance(one, StepFuture) else one
        metrics.update(result.metrics)
        facts[one.task_name if isinstance(one, StepFuture) else "rollout"] = dict(result.facts)
    spans = [
        _with_facts(span, facts.get(span.task, {})) for span in spans_of([*futures, *ahead], at.iteration, at.attempt)
    ]
    return Outcome(
        at=at,
        metrics=metrics,
        facts=facts,
        span=IterationSpan(
            iteration=at.iteration,
            attempt=at.attempt,
            started=first if since is None else since,
            ended=time.monotonic(),
            facts={
                "controller_bytes": payload_bytes(spans),
                "attempts": at.attempt,
                "between_seconds": 0.0 if since is None else first - since,
            },
        ),
        spans=spans,
        ahead=tuple(results),
        flow_run_id=UUID(flow_run.id) if flow_run.id else None,
    )


def _with_facts(span: TaskSpan, facts: Mapping[str, Any]) -> TaskSpan:
    """The span with what its step knows of itself, where telemetry has a name for it."""
    known = {name: value for name, value in facts.items() if name in FACTS}
    return replace(span, facts={**span.facts, **known}) if known else span
