"""The Prefect API of a run: start or reach a server, wait out its outages, see from every node, notice a cancel."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import ray
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import get_client
from prefect.context import SyncClientContext, get_settings_context
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from prefect.settings.context import get_current_settings
from prefect.states import Cancelled
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.training import PrefectConfig
from resources.api_probe import probe_api
from resources.prefect_server import PrefectServer, PrefectServerError
from resources.prefect_supervisor import home_served_at, is_healthy

REACH_SECONDS = 5.0
"""A server that is named but does not answer within this is refused."""
LOOK_SECONDS = 2.0
PROBE_SECONDS = 120.0
"""A node that is busy needs seconds to start the process that asks."""
FLUSH_SECONDS = 20.0
"""A healthy server takes thousands of events in that time; one that is gone takes none."""

FIRST_RETRY_SECONDS = 0.05
"""After a 503; four times as long after each further one."""
IDLE_SECONDS = 4.0
"""A connection that was idle for longer is not used again. A server closes it after five, and Prefect's client, which
would keep it for 25, waits two seconds when both happen at once."""
_TRIED = "callsheet_tried"


class ApiUnreachableError(RuntimeError):
    """Prefect's API does not answer: from where, at which address, why, and what to do."""


@contextlib.contextmanager
def prefect_api(config: PrefectConfig) -> Iterator[str]:
    """Settings under which flows of this process run; yields the API's URL.

    `prefect.api_url`, then PREFECT_API_URL, then the active Prefect profile name a running server, which has to answer
    within seconds; where none does the embedded server is started or joined, and given up at the end. Raises
    ApiUnreachableError or PrefectServerError.
    """
    url = config.api_url or _configured_url()
    with contextlib.ExitStack() as stack:
        if url is None:
            server = PrefectServer(config.home, start_timeout_seconds=config.start_timeout_seconds)
            url = stack.enter_context(server).api_url
            stack.enter_context(_kept_alive(server))
            # It hands out no tokens, so no client needs to ask for one first: one request less a subflow.
            stack.enter_context(temporary_settings({PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}))
        else:
            _require_reachable(url, *source_of_url(config))
        stack.enter_context(
            temporary_settings(
                {
                    PREFECT_API_URL: url,
                    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
                    # A subflow otherwise ends with up to a second of waiting for its heartbeat thread.
                    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
                }
            )
        )
        try:
            yield url
        finally:
            flush()


@contextlib.contextmanager
def _kept_alive(server: PrefectServer) -> Iterator[None]:
    """Whoever kills the embedded server with its supervisor finds it started again, at the same address."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            try:
                if server.revive():
                    get_logger("callsheet").warning("the Prefect server was gone and is started again")
            except PrefectServerError as error:  # another run holds the lock for its start; it is asked again
                get_logger("callsheet").warning("the Prefect server is gone: %s", error)

    thread = threading.Thread(target=look, name="prefect-server-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(timeout=REACH_SECONDS)


@contextlib.contextmanager
def quick_retries() -> Iterator[None]:
    """Flows that run inside the block ask a busy server again soon, and never on a connection that it is closing.

    SQLite refuses a write that meets another one, and the server answers 503; Prefect's clients would then sleep for
    two seconds, an iteration's worth, where a few milliseconds are enough. They have no setting for it, but they heed
    the header; the engine makes clients of both kinds for itself, so the hook goes to all that are made in the block.
    """
    with hooked_clients(), new_client_context():
        yield


def new_client_context() -> SyncClientContext:
    """A context with a client of its own; made inside another one, Prefect's would take that one's client."""
    none: Any = None
    outer = SyncClientContext.__var__.set(none)
    try:
        return SyncClientContext()
    finally:
        SyncClientContext.__var__.reset(outer)


@contextlib.contextmanager
def hooked_clients() -> Iterator[None]:
    """Clients that are made inside the block write into a 503 when to ask again, and drop idle connections in time."""
    with _hooked(PrefectHttpxSyncClient, hint_retry), _hooked(PrefectHttpxAsyncClient, _hint_retry_async):
        yield


@contextlib.contextmanager
def _hooked(kind: type[httpx.Client] | type[httpx.AsyncClient], hook: Callable[..., Any]) -> Iterator[None]:
    """Clients of this kind that are made inside the block call `hook` with every response."""
    make: Any = kind.__init__

    def make_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        limits = kwargs.get("limits")
        if limits is not None:
            kwargs["limits"] = httpx.Limits(
                max_connections=limits.max_connections,
                max_keepalive_connections=limits.max_keepalive_connections,
                keepalive_expiry=IDLE_SECONDS,
            )
        make(self, *args, **kwargs)
        self.event_hooks["response"].append(hook)

    kind.__init__ = make_with_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__init__ = make  # type: ignore[method-assign]


async def _hint_retry_async(response: httpx.Response) -> None:
    hint_retry(response)


def hint_retry(response: httpx.Response) -> None:
    """Write into a 503 that says nothing of it when to ask again."""
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or "Retry-After" in response.headers:
        return
    tried = response.request.extensions.get(_TRIED, 0)
    response.request.extensions[_TRIED] = tried + 1
    response.headers["Retry-After"] = str(FIRST_RETRY_SECONDS * 4**tried)


def flush(seconds: float = FLUSH_SECONDS) -> None:
    """Send the events and log lines that this process still holds; afterwards its server may go.

    What cannot be sent within `seconds` is given up: a process that ends would try each event for seven seconds.
    """
    end = time.monotonic() + seconds
    services = [*EventsWorker._instances.values()]  # pyright: ignore[reportPrivateUsage] - there is no public list
    for service in (EventsWorker, APILogWorker):
        service.drain_all(timeout=max(0.1, end - time.monotonic()))
    for service in services:
        with contextlib.suppress(queue.Empty):
            while True:
                service._queue.get_nowait()  # pyright: ignore[reportPrivateUsage]
        service._queue.put_nowait(None)  # pyright: ignore[reportPrivateUsage] - its word for the end


def _configured_url() -> str | None:
    return get_current_settings().api.url or os.environ.get("PREFECT_API_URL") or None


def source_of_url(config: PrefectConfig) -> tuple[str, str]:
    """Who names a server for this run, and how it comes to name none."""
    if config.api_url:
        return "prefect.api_url", "leave it out of the config"
    url, profile = _configured_url(), get_settings_context().profile
    if os.environ.get("PREFECT_API_URL") == url:
        return "PREFECT_API_URL", "unset it"
    if profile.settings.get(PREFECT_API_URL) == url:
        way_out = "take it out of that (`prefect config unset PREFECT_API_URL`, or `prefect profile use ANOTHER`)"
        return f"the active Prefect profile {profile.name!r}", way_out
    return "a Prefect setting", "take it out of the file that `prefect config view --show-sources` names"


def _require_reachable(url: str, source: str, way_out: str) -> None:
    end = time.monotonic() + REACH_SECONDS
    while (reason := is_healthy(url)) is not None:
        if time.monotonic() >= end:
            raise ApiUnreachableError(
                f"no Prefect server answers at {url} ({reason}), which {source} names; start it with `prefect server"
                f" start`, correct the address, or {way_out} to use the embedded server"
            )
        time.sleep(0.2)


def ui_url(api_url: str) -> str:
    """Where a person looks.

    >>> ui_url("http://127.0.0.1:4200/api")
    'http://127.0.0.1:4200'
    """
    return api_url.rstrip("/").removesuffix("/api")


def wait_for_api(deadline_seconds: float, api_url: str | None = None) -> float:
    """Wait until the API answers; returns the seconds it took. Raises ApiUnreachableError after `deadline_seconds`."""
    url = api_url or _configured_url()
    if url is None:
        raise ApiUnreachableError(
            "no Prefect API is configured; run inside `with prefect_api(...)` or set PREFECT_API_URL"
        )
    begun = time.monotonic()
    while (reason := is_healthy(url)) is not None:
        if time.monotonic() - begun >= deadline_seconds:
            raise ApiUnreachableError(
                f"Prefect's API at {url} has not answered for {deadline_seconds:g} s ({reason}); the run can be resumed"
            )
        time.sleep(0.25)
    return time.monotonic() - begun


def check_from_nodes(api_url: str | None = None, deadline_seconds: float = PROBE_SECONDS) -> dict[str, str]:
    """Ask the API from every node of the cluster; returns node id -> IP.

    Raises ApiUnreachableError naming the nodes that cannot: a host there would lose its task rows in silence.
    """
    url = api_url or _configured_url() or ""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    probe = ray.remote(probe_api)
    asked: dict[Any, str] = {
        probe.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(url): node
        for node in nodes
    }
    done, pending = ray.wait(list(asked), num_returns=len(asked), timeout=deadline_seconds)
    failed = {nodes[asked[ref]]: f"did not answer within {deadline_seconds:g} s" for ref in pending}
    for ref in done:
        reason = ray.get(ref)
        if reason is not None:
            failed[nodes[asked[ref]]] = reason
    if failed:
        where = "; ".join(f"node {node}: {reason}" for node, reason in sorted(failed.items()))
        loopback = (
            " A loopback address is only reached from its own machine."
            if "127.0.0.1" in url or "localhost" in url
            else ""
        )
        raise ApiUnreachableError(
            f"Prefect's API at {url} is not reached from every node ({where}).{loopback} Run a Prefect server that all"
            " nodes reach and name it in prefect.api_url"
        )
    return nodes


class RunCancelledError(RuntimeError):
    """Somebody cancelled the flow run, in the UI or with `prefect flow-run cancel`."""


def confirm_cancelled(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook for `@flow(on_cancellation=[...])`: a run that was told to cancel, and ended, says so.

    Without it the run would stay `Cancelling`, since the server takes no other end from it; a Prefect worker does
    the same for the runs it started. Prefect passes the arguments by these names.
    """
    if state.is_cancelling():
        with contextlib.suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
            message = "cancelled; the run's processes and placement groups are gone"
            client.set_flow_run_state(flow_run.id, Cancelled(message=message))


class CancelWatch:
    """Looks every few seconds whether a flow run was cancelled; `check()` raises RunCancelledError once it was.

    A run that was deleted counts as cancelled. A server that does not know it because it is another one, which took
    the port while ours was away, says nothing about it.
    """

    def __init__(self, flow_run_id: UUID | str, every_seconds: float = 2.0) -> None:
        self._id = UUID(str(flow_run_id))
        self._every = every_seconds
        self._stop = threading.Event()
        self._cancelled = threading.Event()
        self._context = get_current_settings()
        self._home: Path | None = None
        """Of the server that knew the run."""
        self._thread = threading.Thread(target=self._look, name="cancel-watch", daemon=True)

    def __enter__(self) -> "CancelWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        if self.is_cancelled:
            raise RunCancelledError(f"flow run {self._id} was cancelled")

    def _look(self) -> None:
        with temporary_settings({PREFECT_API_URL: self._context.api.url}):
            while not self._stop.wait(self._every) and not self._cancelled.is_set():
                try:
                    with get_client(sync_client=True) as client:
                        self._watch_with(client)
                except httpx.HTTPError:
                    continue  # an outage; it is looked again

    def _watch_with(self, client: Any) -> None:
        url = self._context.api.url or ""
        while not self._stop.is_set():
            try:
                state = client.read_flow_run(self._id).state
                is_over = state is not None and (state.is_cancelling() or state.is_cancelled())
                self._home = self._home or home_served_at(url)
            except ObjectNotFound:
                is_over = self._home is None or home_served_at(url) == self._home
            if is_over:
                self._cancelled.set()
                return
            self._stop.wait(self._every)
