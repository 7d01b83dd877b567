"""Fixtures of tests that run flows: the session's Prefect server and Ray cluster, and HTTP services by a script."""

from tests.harness import prefect_session, ray_session
from tests.scripted_service import serve

__all__ = ["prefect_session", "ray_session", "serve"]
