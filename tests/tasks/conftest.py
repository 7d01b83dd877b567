"""Fixtures of tests of tasks: the session's Prefect server and Ray cluster, and a whole cast in this process."""

from collections.abc import Iterator

import pytest

from tests.harness import prefect_session, ray_session
from tests.tasks.local_cast import SmallCast

__all__ = ["prefect_session", "ray_session", "small_cast"]


@pytest.fixture(scope="session")
def small_cast() -> Iterator[SmallCast]:
    """Workers of all roles with the scripted engine; tests that need another script or data make that worker anew."""
    cast = SmallCast()
    yield cast
    cast.close()
