"""Grading in another layout: by hand, and from spans."""

from dataclasses import replace
from pathlib import Path

import pytest

from resources.telemetry.grading import grading_seconds
from resources.telemetry.profile import GraderProfile, RolloutProfile, measure_profile
from resources.telemetry.reader import SpanReader
from resources.telemetry.sampling import finished_shares
from resources.telemetry.topology import measured_topology, with_ranks
from resources.telemetry.whatif import predict
from tests.resources.telemetry.scenarios import grader_facts, iteration, run_record, write_run
from tests.resources.telemetry.test_whatif import SPLIT, gauged, profile

STREAMED = GraderProfile(total_seconds=32.0, max_seconds=1.0, workers=8, is_streamed=True)


def test_responses_that_end_together_leave_all_their_grading_behind_the_rollout():
    """32 responses of 100 tokens end at 3 s; 32 calls of 1 s, eight at once, take four more, the siblings 0.5."""
    made = profile(grader=STREAMED)
    assert predict(made, measured_topology(made)).step_seconds == pytest.approx(SPLIT + 3.5)


def test_grading_hides_under_the_rest_of_the_rollout_once_the_first_responses_have_ended():
    """Four slots take eight waves of 25 tokens at 30 ms: the first ends at 0.75 s, the last at 6 s."""
    made = profile(lengths=(25,), grader=replace(STREAMED, total_seconds=64.0, max_seconds=2.0))
    layout = replace(measured_topology(made), max_running_sequences=4)
    # eight seconds of grading from 0.75 s on: 2.75 are left at 6 s, of them 0.5 beside the siblings
    assert predict(made, layout).step_seconds == pytest.approx(6.0 + 2.75 + 0.05 + 1.8 + 0.3)


def test_graders_that_are_slower_than_everything_else_bound_the_step_of_a_run_that_samples_ahead():
    """20 s of grading: 5.25 of them under the rollout, and 14.75 + 2.15 of training behind it are less than 20."""
    made = profile(lengths=(25,), grader=replace(STREAMED, total_seconds=160.0))
    prediction = predict(made, replace(measured_topology(made), max_running_sequences=4, async_depth=1))
    assert prediction.step_seconds == pytest.approx(20.0)
    assert prediction.bottleneck == "reward"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_four_times_the_group_takes_four_times_the_grading(is_streamed: bool):
    """All responses end at 3 s however many there are, so that a long rollout hides none of the grading."""
    made = profile(step_seconds=0.3, grader=replace(STREAMED, is_streamed=is_streamed))
    base = replace(measured_topology(made), max_running_sequences=128)
    task = made.tasks["reward"]
    assert grading_seconds(task, made, base, 1.0, 30.0) == pytest.approx(4.0)
    assert grading_seconds(task, made, replace(base, group_size=16), 4.0, 30.0) == pytest.approx(16.0)


def test_a_few_workers_on_a_large_pool_stay_a_few():
    """One reward worker on a pool of eight bundles: its layout is predicted as it was, not eight times as fast."""
    made = profile(grader=replace(STREAMED, is_streamed=False))
    made = replace(made, pools={**made.pools, "reward": 8})
    assert predict(made, measured_topology(made)).busy_seconds["reward"] == pytest.approx(4.0)
    assert predict(made, with_ranks(measured_topology(made), reward=16)).busy_seconds["reward"] == pytest.approx(2.0)


def test_grading_beyond_the_graders_calls_grows_with_the_rows_too(tmp_path: Path):
    """32 calls of 10 ms in two processes are 0.16 s of the 0.96 s that were measured."""
    facts = grader_facts([0.01] * 32, workers=2)
    runs = [
        iteration(n, 10.0 * n, seconds={"reward": 0.96}, facts={"reward": facts}, ranks={"rollout": gauged})
        for n in range(3)
    ]
    reader = SpanReader(path=write_run(tmp_path, runs, run_record()))
    measured = measure_profile(reader.iterations(), run_record())
    base = measured_topology(measured)
    assert predict(measured, base).busy_seconds["reward"] == pytest.approx(0.96)
    larger = replace(base, group_size=16, max_running_sequences=128)
    assert predict(measured, larger).busy_seconds["reward"] == pytest.approx(4 * 0.96)


def test_shares_of_a_rollout_fall_as_its_responses_end():
    """Four slots, eight waves: when the second wave ends at a quarter of the rollout, 28 of 32 end then or later."""
    rollout = RolloutProfile(
        num_engines=1, step_seconds=1.0, token_seconds=0.0, overhead_seconds=0.0, slots=4,
        length_edges=(25, 25), length_weights=(1.0,),
    )  # fmt: skip
    ends = finished_shares(rollout, measured_topology(profile()))
    assert ends[0] == (1 / 8, 1.0)
    assert (2 / 8, 28 / 32) in ends
    assert ends[-1] == (1.0, 1 / 32)
