"""Fixtures of tests that run flows: the session's Prefect server and Ray cluster."""

from tests.harness import prefect_session, ray_session

__all__ = ["prefect_session", "ray_session"]
