"""The small form of the benchmarks: what counts as worse, and what as not measured."""

import math

import pytest

from benchmarks.small import differences, worse_ones, worsening


def line(value: float, better: str) -> dict[str, object]:
    return {"value": value, "better": better}


@pytest.mark.parametrize(
    ("value", "better", "is_worse"),
    [
        (1.24, "lower", False),
        (1.26, "lower", True),
        (0.5, "lower", False),
        (0.81, "higher", False),
        (0.79, "higher", True),
        (2.0, "higher", False),
        (math.nan, "lower", True),
        (math.nan, "higher", True),
    ],
)
def test_a_ratio_is_worse_when_it_is_a_quarter_off_in_the_wrong_direction(value: float, better: str, is_worse: bool):
    assert (worse_ones({"x": line(value, better)}, {"x": 1.0}) == ["x"]) is is_worse


def test_half_of_what_was_recorded_is_twice_as_bad_where_more_is_better():
    assert worsening(line(0.6, "higher"), 1.2) == pytest.approx(1.0)
    assert worsening(line(1.2, "lower"), 0.6) == pytest.approx(1.0)


def test_a_recorded_ratio_that_is_printed_no_more_is_a_difference():
    recorded = {"rollout: a": 1.0, "rollout: b": 1.0, "rollout_of_another: c": 1.0}
    assert differences("rollout", {"rollout: a": {}, "rollout: b": {}}, recorded) == []
    assert differences("rollout", {"rollout: a": {}, "rollout: new": {}}, recorded) == [
        "'rollout: b' is recorded and was not printed",
        "'rollout: new' was printed and is not recorded",
    ]
