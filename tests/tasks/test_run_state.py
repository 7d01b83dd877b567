"""Where a run stands: numbers that roll forward with an iteration and survive a manifest."""

import json

import pytest

from configs.load import load_config
from tasks.run_state import RunState, next_kl_coef


def test_a_finished_iteration_moves_iteration_version_and_position():
    state = RunState(iteration=4, policy_version=4, epoch=0, start=2048, kl_coef=0.1)
    after = state.after(position={"epoch": 1, "start": 128, "identity": "abc"}, kl_coef=0.2)
    assert (after.iteration, after.policy_version, after.epoch, after.start, after.kl_coef) == (5, 5, 1, 128, 0.2)
    assert after.data_identity == "abc"


def test_state_of_other_parts_is_kept_until_it_is_replaced():
    state = RunState(parts={"reward": {"count": 1}, "curriculum": ["a"]})
    after = state.after(position={"epoch": 0, "start": 1}, kl_coef=0.0, parts={"reward": {"count": 2}})
    assert after.parts == {"reward": {"count": 2}, "curriculum": ["a"]}


def test_state_survives_json():
    state = RunState(iteration=3, kl_coef=0.1, parts={"reward": {"mean": 0.5}})
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_fixed_coefficient_stays():
    config = load_config("quickstart", ["algorithm.kl.coef=0.02"])
    assert next_kl_coef(config, 0.02, {"actor/reference_kl": 50.0}) == 0.02


def test_an_adaptive_coefficient_moves_by_the_clipped_error():
    """0.1 * (1 + clip(2/1 - 1, -0.2, 0.2) * 10 / 100) = 0.102, with ten rows an iteration."""
    config = load_config(
        "quickstart",
        [
            "algorithm.kl.coef=0.1",
            "algorithm.kl.controller=adaptive",
            "algorithm.kl.target=1.0",
            "algorithm.kl.horizon=100.0",
            "data.prompts_per_iteration=10",
            "algorithm.num_mini_batches=2",
        ],
    )
    assert next_kl_coef(config, 0.1, {"actor/reference_kl": 2.0}) == pytest.approx(0.102)


def test_an_iteration_without_a_measured_kl_leaves_the_coefficient():
    config = load_config("quickstart", ["algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive"])
    assert next_kl_coef(config, 0.1, {}) == 0.1


def test_a_fixed_coefficient_is_the_configs_own_and_a_moved_one_goes_on():
    state = RunState(iteration=3, kl_coef=0.1)
    fixed = load_config("quickstart", ["algorithm.kl.coef=0.05"])
    adaptive = load_config("quickstart", ["algorithm.kl={coef: 0.05, controller: adaptive, horizon: 100000}"])
    assert state.under(fixed) == RunState(iteration=3, kl_coef=0.05)
    assert state.under(adaptive) == state
