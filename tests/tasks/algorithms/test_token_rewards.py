import math

import pytest
import torch
from torch import tensor

from tasks.algorithms.token_rewards import overlong_penalty, spread_scores

NAN = math.nan


def test_the_score_lies_on_the_last_sampled_token() -> None:
    mask = tensor([[True] * 4 + [False] * 2])
    placed = spread_scores(tensor([1.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 1, 0, 0]]
    assert placed[mask].sum() == 1.0, "one slot later the sum over the mask would be 0"


def test_tool_output_at_the_end_gets_no_reward() -> None:
    assert spread_scores(tensor([1.0]), tensor([[True, True, False, False]])).tolist() == [[0, 1, 0, 0]]


def test_a_row_without_score_or_without_token_gets_nothing() -> None:
    mask = tensor([[True, True], [False, False], [True, False]])
    assert spread_scores(tensor([NAN, 5.0, 2.0]), mask).tolist() == [[0, 0], [0, 0], [2, 0]]


def test_the_overlong_penalty_ramps_before_the_maximum() -> None:
    penalty = overlong_penalty(tensor([15, 16, 18, 20, 25]), max_length=20, buffer=5, factor=1.0)
    assert penalty.tolist() == pytest.approx([0, -0.2, -0.6, -1, -1])
    assert overlong_penalty(tensor([18]), max_length=20, buffer=5, factor=0.5).tolist() == pytest.approx([-0.3])


@pytest.mark.parametrize("buffer", [21, 0, -1])
def test_an_overlong_buffer_outside_the_maximum_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer is {buffer} and max_length 20"):
        overlong_penalty(tensor([1]), max_length=20, buffer=buffer)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_or_no_tokens_have_no_slot_for_a_score(shape: tuple[int, int]) -> None:
    assert spread_scores(torch.ones(shape[0]), torch.zeros(shape, dtype=torch.bool)).shape == shape
