"""Losses that are no numbers: skipped and counted, or the end, as the config says; never silently."""

import re
from pathlib import Path

import pytest

from configs.training import RecoveryConfig
from resources.run_directory import RunDirectory, read_lines
from tasks.policies import NanLossError, check_nan_policy
from tasks.run_state import RunState


@pytest.fixture
def directory(run_dir: Path) -> RunDirectory:
    return RunDirectory.create(run_dir, "nan")


def test_skipped_steps_of_all_roles_and_iterations_add_up(directory: RunDirectory):
    state = RunState(nan_steps=3)
    metrics = {"actor/skipped_steps": 2.0, "critic/skipped_steps": 1.0}
    assert check_nan_policy(RecoveryConfig(max_nan_steps=6), directory, state, metrics) == 6
    assert [event["total"] for event in read_lines(directory.events)] == [6]


def test_one_step_more_than_allowed_ends_the_run(directory: RunDirectory):
    state = RunState(iteration=41, nan_steps=3)
    with pytest.raises(NanLossError, match=r"iteration 41: .* in 4 optimizer steps .* allows 3"):
        check_nan_policy(RecoveryConfig(max_nan_steps=3), directory, state, {"actor/skipped_steps": 1.0})


def test_the_file_and_the_keys_to_change_are_named(directory: RunDirectory):
    metrics = {"actor/skipped_steps": 1.0, "critic/skipped_steps": 2.0}
    said = (
        f"lower actor.optimizer.lr and critic.optimizer.lr in {directory.path}/config.yaml and go on with: "
        f"callsheet resume {directory.path}"
    )
    with pytest.raises(NanLossError, match=re.escape(said)):
        check_nan_policy(RecoveryConfig(max_nan_steps=1), directory, RunState(), metrics)


def test_stop_means_the_first_one(directory: RunDirectory):
    with pytest.raises(NanLossError, match="on_nan_loss is stop"):
        check_nan_policy(RecoveryConfig(on_nan_loss="stop"), directory, RunState(), {"critic/skipped_steps": 1.0})


def test_an_iteration_without_any_leaves_no_event(directory: RunDirectory):
    assert check_nan_policy(RecoveryConfig(), directory, RunState(nan_steps=2), {"actor/skipped_steps": 0.0}) == 2
    assert not directory.events.exists()


def test_the_count_survives_a_checkpoint():
    assert RunState.from_json(RunState(nan_steps=2).to_json()).nan_steps == 2
