"""One Prefect test server and one Ray cluster for the whole test session, whichever folder's tests ask first."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import ray
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from resources.ray_state import set_up_local_ray
from tasks.api import flush

_open: dict[str, object] = {}
_users: dict[str, int] = {}

os.environ.setdefault("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE", "200")
os.environ.setdefault("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE", "200")
# Whole seconds: Prefect cuts the interval to an integer, and at 0 the server spins on a whole core.
os.environ.setdefault("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL", "1")


@contextlib.contextmanager
def _harness() -> Iterator[None]:
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield
        flush()


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    set_up_local_ray()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        namespace="tests",
    )
    yield
    ray.shutdown()


@contextlib.contextmanager
def cluster_and_server() -> Iterator[None]:
    """Both, for a command that makes runs outside pytest."""
    with _harness(), _cluster():
        yield


def _shared(name: str, make: object) -> Iterator[None]:
    _users[name] = _users.get(name, 0) + 1
    if name not in _open:
        _open[name] = make()  # pyright: ignore[reportCallIssue]
        _open[name].__enter__()  # pyright: ignore[reportAttributeAccessIssue]
    yield
    _users[name] -= 1
    if not _users[name]:
        _open.pop(name).__exit__(None, None, None)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="session")
def prefect_session() -> Iterator[None]:
    """Prefect's test server, without heartbeats around subflows."""
    yield from _shared("prefect", _harness)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray cluster of eight logical CPUs."""
    yield from _shared("ray", _cluster)
