"""Bottlenecks planted in real runs: the map names the role and the cause, and its parts add up to the clock."""

from pathlib import Path

import pytest

from resources.telemetry.causes import Cause
from tests.flows.planted_runs import PAIR, PLANTS, Plant, run_plant

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_a_planted_bottleneck_is_named_with_role_and_cause(plant: Plant, tmp_path: Path):
    """Three runs of each: `python -m tests.flows.planted_runs`."""
    judged = run_plant(plant, tmp_path, seed=0)
    verdict = judged.report.verdict
    assert verdict is not None
    assert (verdict.role, verdict.cause) == (plant.role, plant.cause), verdict.line
    assert judged.error_of_sums <= 0.02


def test_the_plants_of_a_slow_reference_are_with_the_actors_own_log_probs_and_without(tmp_path: Path):
    """A run of one optimizer step an iteration has no task to compare the reference with but the update."""
    slow = [plant.config(tmp_path, "r", 0) for plant in PLANTS if plant.cause is Cause.SLOW_REFERENCE]
    assert sorted(config.recomputes_log_probs for config in slow) == [False, True]


def test_a_grader_in_the_main_pool_holds_the_step_back_and_in_its_own_it_does_not(tmp_path: Path):
    """Two lines of config. Two seconds of grading and two of scoring: one after the other, then side by side."""
    together, apart = (run_plant(plant, tmp_path, seed=0).report.verdict for plant in PAIR)
    assert together is not None
    assert apart is not None
    assert (together.role, together.cause) == ("reward", Cause.SLOW_GRADER)
    assert apart.role != "reward"
    assert apart.step_seconds < together.step_seconds
