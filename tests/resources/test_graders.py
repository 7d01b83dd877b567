"""What a grading function returned is a score for each response, or a reason why there is none."""

import math

import numpy as np
import pytest
import torch

from resources.grader_process import plain
from resources.graders import GraderFailedError, check_scores
from tasks.rewards.score import Score


def scores_of(returned: object, count: int = 1, *, is_group: bool = False) -> tuple[float, ...]:
    """The way of an answer from the grader's process to the batch."""
    return check_scores(plain(returned), count, "g", is_group=is_group)


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        ([0.25], 0.25),
        ({"score": 1}, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (torch.tensor(3.0), 3.0),
        (Score(2.0, "why"), 2.0),
    ],
)
def test_what_one_call_returned_is_a_score(returned: object, score: float):
    assert scores_of(returned) == (score,)


@pytest.mark.parametrize(
    "returned", [None, math.nan, math.inf, 10**400, -(10**400), Score(math.nan), "1", 1j, [[1.0, 2]]]
)
def test_what_is_no_finite_number_is_refused_by_its_type(returned: object):
    with pytest.raises(GraderFailedError, match=r"'g' returned .*; a score is a finite number"):
        scores_of(returned)


@pytest.mark.parametrize("length", [1, 5, 7])
def test_a_batch_of_another_length_is_never_broadcast(length: int):
    with pytest.raises(GraderFailedError, match=f"returned {length} scores for 6 responses; it has to return 6"):
        scores_of([1.0] * length, 6, is_group=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "returned float '1.0'; it has to return a list of 6 scores"),
        ("abcdef", "returned str 'abcdef'; it has to return a list of 6 scores"),
        (None, "returned NoneType 'None'; it has to return a list of 6 scores"),
        (np.zeros((6, 2)), "a score is a finite number"),
        (np.zeros((1, 6)), "returned 1 scores for 6 responses"),
        (torch.zeros(5), "returned 5 scores for 6 responses"),
    ],
)
def test_a_batch_of_another_shape_is_named(returned: object, message: str):
    with pytest.raises(GraderFailedError, match=message):
        scores_of(returned, 6, is_group=True)


@pytest.mark.parametrize(
    "returned", [[0.5] * 6, (0.5,) * 6, np.full(6, 0.5), np.full((6, 1), 0.5), torch.full((6,), 0.5)]
)
def test_a_batch_of_the_right_length_is_accepted(returned: object):
    assert scores_of(returned, 6, is_group=True) == (0.5,) * 6
