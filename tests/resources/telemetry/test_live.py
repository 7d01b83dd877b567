"""What a flow shows after each iteration."""

import pytest

from resources.telemetry.causes import Cause
from resources.telemetry.live import view_iteration
from tests.resources.telemetry.scenarios import grader_facts, iteration


def test_metrics_of_an_iteration_are_all_under_time_and_each_role_sums_to_the_step():
    tasks, span = iteration(seconds={"reward": 4.0}, facts={"reward": grader_facts([1.0] * 4)})
    view = view_iteration(tasks, span)
    metrics = view.metrics()
    assert all(name.startswith("time/") for name in metrics)
    assert metrics["time/step"] == pytest.approx(span.ended - span.started)
    assert metrics["time/reward"] == pytest.approx(4.0)
    for role in ("rollout", "reward", "actor", "critic", "reference", "advantage"):
        parts = sum(metrics[f"time/{role}/{part}"] for part in ("busy", "transfer", "waiting", "idle"))
        assert parts == pytest.approx(metrics["time/step"], rel=0.02)


def test_the_artifact_names_the_planted_role_and_what_to_change():
    tasks, span = iteration(seconds={"reward": 4.0}, facts={"reward": grader_facts([1.0] * 4)})
    view = view_iteration(tasks, span)
    assert (view.verdict.role, view.verdict.cause) == ("reward", Cause.SLOW_GRADER)
    text = view.markdown()
    assert text.startswith("**reward: slow grader, up to -")
    assert "| reference | 0.50 | 0.00 | 3.02 |" in text
    assert view.image_uri().startswith("data:image/svg+xml;base64,")
