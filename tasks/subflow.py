"""Call the iteration's subflow so that a server outage, or a retried parent, never runs a finished body again.

Prefect finds a subflow of a retried parent by its position among the calls and adopts its result; here every call is
keyed by run count, iteration and attempt instead. The body runs at most once per call, whatever the API does.
"""

import copy
import functools
import time
from collections.abc import Mapping
from typing import Any

import httpx
from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from tasks.api import ApiUnreachableError, wait_for_api

API_ERRORS = (httpx.TransportError, PrefectHTTPStatusError)
"""What a client raises while its server is away or restarting; but see `_may_pass`."""
PASSING_STATUSES = (408, 429)
"""Of those below 500; the others (a missing right, a request that is none) come again however long one waits."""
PAUSE_SECONDS = 1.0
"""Between two calls of a server that answers its health check and nothing else."""
MAX_ATTEMPTS = 100
MAX_ITERATIONS = 10_000_000


def iteration_run_name() -> str:
    """`iteration-0042`, and `iteration-0042-attempt-2` when it runs again; for `@flow(flow_run_name=...)`."""
    parameters: Mapping[str, Any] = flow_run.parameters or {}
    name = f"iteration-{parameters['iteration']:04d}"
    attempt = parameters.get("attempt", 1)
    return name if attempt == 1 else f"{name}-attempt-{attempt}"


def call_iteration(
    flow: Flow[Any, Any], *, iteration: int, attempt: int, outage_seconds: float, **parameters: Any
) -> Any:
    """Run `flow(iteration=..., attempt=..., **parameters)` as a subflow; see `call_subflow`."""
    return call_subflow(
        flow,
        iteration=iteration,
        attempt=attempt,
        outage_seconds=outage_seconds,
        parameters={"iteration": iteration, "attempt": attempt, **parameters},
    )


def call_subflow(
    flow: Flow[Any, Any],
    *,
    iteration: int,
    attempt: int,
    outage_seconds: float,
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """Run `flow(**parameters)` as a subflow that iteration and attempt identify; returns what its body returned.

    While the API is away before the body has started, waits up to `outage_seconds` in all and calls again. Once the
    body has run it is not run again: its result is returned although its row could not be closed. Raises what the
    body raised, ApiUnreachableError, or PrefectHTTPStatusError for what the API refuses.
    """
    outcome = _Outcome()
    guarded = copy.copy(flow)
    guarded.fn = _once(flow.fn, outcome)
    give_up_at: float | None = None
    while True:
        _key_by_identity(guarded, iteration, attempt)
        try:
            return guarded(**(parameters or {}))
        except API_ERRORS as error:
            if outcome.error is not None:
                raise outcome.error from error
            if not (_may_pass(error) or outcome.is_done):
                raise
            now = time.monotonic()
            give_up_at = now + outage_seconds if give_up_at is None or outcome.is_done else give_up_at
            if now >= give_up_at:
                raise ApiUnreachableError(
                    f"Prefect's API has taken no call of iteration {iteration} for {outage_seconds:g} s, though it says"
                    f" that it is healthy ({error}); the run can be resumed"
                ) from error
            get_logger("callsheet").warning(
                "Prefect's API went away in iteration %d: %s; waiting for it", iteration, error
            )
            wait_for_api(give_up_at - now)
            if outcome.is_done:
                _close_row(outcome)
                return outcome.result
            time.sleep(PAUSE_SECONDS)


def _may_pass(error: httpx.TransportError | PrefectHTTPStatusError) -> bool:
    """Whether the same call may be taken later."""
    if not isinstance(error, PrefectHTTPStatusError):
        return True
    status = error.response.status_code
    return status >= 500 or status in PASSING_STATUSES


class _Outcome:
    """What the body did, kept apart from Prefect's engine, which needs the API to say so."""

    def __init__(self) -> None:
        self.is_done = False
        self.result: Any = None
        self.error: Exception | None = None
        self.flow_run_id: Any = None


def _once(body: Any, outcome: _Outcome) -> Any:
    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        context = FlowRunContext.get()
        outcome.flow_run_id = context.flow_run.id if context is not None and context.flow_run is not None else None
        try:
            outcome.result = body(*args, **kwargs)
        except Exception as error:
            outcome.error = error
            raise
        outcome.is_done = True
        return outcome.result

    return run


def _key_by_identity(flow: Flow[Any, Any], iteration: int, attempt: int) -> None:
    parent = FlowRunContext.get()
    if parent is None:
        return
    run_count = parent.flow_run.run_count if parent.flow_run is not None else 1
    tracking = Task(name=flow.name, fn=flow.fn, version=flow.version)
    number = (run_count * MAX_ITERATIONS + iteration) * MAX_ATTEMPTS + attempt
    parent.task_run_dynamic_keys[tracking.task_key] = number - 1  # Prefect adds one and uses it


def _close_row(outcome: _Outcome) -> None:
    if outcome.flow_run_id is None:
        return
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(outcome.flow_run_id, Completed(), force=True)
