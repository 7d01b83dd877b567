"""The check of one GPU: a device that does something else than the CPU is told."""

import math
from typing import Any

import pytest

from benchmarks.gpu_check import compare

EXPECTED: dict[str, Any] = {
    "device": "cpu",
    "log_probs": [-7.0, -6.5, -7.25],
    "moves": [0.02, -0.01, 0.005],
    "loss": 0.03,
    "grad_norm": 2.5,
    "change of the weights": 0.15,
    "greedy": [[5, 6], [7, 8]],
}


def missed(**changes: Any) -> list[str]:
    """Names of the lines whose target is missed by a device that differs in these facts."""
    lines = compare({**EXPECTED, "device": "cuda:0", **changes}, EXPECTED)
    return [line["name"].partition(",")[0].partition(":")[0] for line in lines if not line["ok"]]


def test_the_same_numbers_up_to_the_order_of_sums_pass():
    assert missed() == []
    assert missed(moves=[0.0201, -0.01, 0.005], log_probs=[-7.0002, -6.5, -7.25], grad_norm=2.501) == []


@pytest.mark.parametrize(
    ("moves", "change"),
    [([0.0, 0.0, 0.0], 0.0), ([0.01, -0.005, 0.0025], 0.075)],
)
def test_a_device_that_takes_no_step_or_one_of_two_fails(moves: list[float], change: float):
    assert missed(moves=moves, **{"change of the weights": change}) == [
        "change of the weights after two steps",
        "moves of the log-probs after two steps",
    ]


def test_steps_of_the_right_size_in_another_direction_fail():
    assert missed(moves=[-0.02, 0.01, -0.005]) == ["moves of the log-probs after two steps"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_log_prob_that_is_no_number_fails_wherever_it_stands(place: int):
    log_probs = list(EXPECTED["log_probs"])
    log_probs[place] = math.nan
    assert missed(log_probs=log_probs) == ["log-probs"]


def test_a_comparison_with_a_cpu_that_moves_nothing_is_none():
    still = {**EXPECTED, "moves": [0.0, 0.0, 0.0], "change of the weights": 0.0}
    assert [line["ok"] for line in compare(still, still)] == [True, True, True, False, False, True]


def test_greedy_tokens_are_compared_response_by_response():
    assert missed(greedy=[[5, 6], [7, 9]]) == ["greedy responses that differ"]
