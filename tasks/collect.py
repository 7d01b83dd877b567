"""Wait for steps: first failure first, with a deadline, and stopped by a cancelled run. Then what they measured."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray

from resources.telemetry.spans import TaskSpan
from tasks.runner import StepFuture
from tasks.step import StepResult

LOOK_SECONDS = 0.5
"""How often a wait looks up to see whether the run was cancelled."""


class StepFailedError(RuntimeError):
    """A step failed: its name and pool stand before its own error, which is the cause."""


def collect(
    futures: Sequence[StepFuture],
    deadline_seconds: float | None = None,
    check: Callable[[], None] | None = None,
    quiet_seconds: Callable[[], float] | None = None,
) -> list[StepResult]:
    """Results of `futures`, in their order.

    `deadline_seconds` is without a sign of progress: a step that ended, or what `quiet_seconds` knows of inside the
    steps (seconds since the last one); it is asked only when no step has ended for so long.

    Raises StepFailedError for the first one that fails (others may still run), HostLostError when a host died,
    TimeoutError naming what is pending, and whatever `check` raises; it is called twice a second while waiting.
    """
    pending = {future.wrapped_future: future for future in futures}
    end = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    while pending:
        if check is not None:
            check()
        left = LOOK_SECONDS if end is None else max(0.0, min(LOOK_SECONDS, end - time.monotonic()))
        done, _ = ray.wait(list(pending), num_returns=1, timeout=left)
        for ref in done:
            _raise_failure(pending.pop(ref))
        if deadline_seconds is None or end is None:
            continue
        if done:
            end = time.monotonic() + deadline_seconds
        elif time.monotonic() >= end:
            quiet = quiet_seconds() if quiet_seconds is not None else deadline_seconds
            if quiet >= deadline_seconds:
                names = sorted(f"{future.task_name} in pool {future.pool}" for future in pending.values())
                raise TimeoutError(f"after {deadline_seconds:g} s without progress still pending: {', '.join(names)}")
            end = time.monotonic() + deadline_seconds - quiet
    return [future.result() for future in futures]


def _raise_failure(future: StepFuture) -> None:
    future.wait()
    if future.state.is_completed():
        return
    error: Any = future.result(raise_on_failure=False) if future.state.is_final() else None
    if future.state.is_crashed() and isinstance(error, BaseException):
        raise error
    reason = error if isinstance(error, BaseException) else None
    raise StepFailedError(
        f"step {future.task_name!r} in pool {future.pool!r}: {reason or future.state.message}"
    ) from reason


def spans_of(futures: Iterable[StepFuture], iteration: int, attempt: int = 1) -> list[TaskSpan]:
    """What the ended steps measured, as records of this iteration."""
    found = [future.span() for future in futures]
    return [replace(span, iteration=iteration, attempt=attempt) for span in found if span is not None]


def payload_bytes(spans: Iterable[TaskSpan]) -> int:
    """Pickled bytes that went through the controller for these steps: parameters, context and results."""
    return sum(span.dispatch.bytes + span.collect.bytes for span in spans)
