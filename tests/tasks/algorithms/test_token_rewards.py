import math

import pytest
import torch
from torch import tensor

from tasks.algorithms.token_rewards import (
    RunningMoments,
    overlong_penalty,
    scale_scores,
    spread_scores,
    update_moments,
)

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


def test_running_moments_do_not_depend_on_the_batching_and_skip_nan() -> None:
    scores = tensor([1.0, 2.0, NAN, 4.0, 7.0])
    whole = update_moments(RunningMoments(), scores)
    parts = RunningMoments()
    for part in (scores[:1], scores[1:3], scores[2:3], scores[3:]):
        parts = update_moments(parts, part)
    assert parts.count == whole.count == 4
    assert parts.mean == pytest.approx(whole.mean) == pytest.approx(3.5)
    assert parts.squares == pytest.approx(whole.squares) == pytest.approx(21.0)


def test_scores_are_scaled_then_clipped_and_keep_nan_and_sign() -> None:
    moments = RunningMoments(count=3, mean=10.0, squares=8.0)
    assert scale_scores(tensor([1.0, -8.0]), moments, clip=None).tolist() == [0.5, -4.0]
    assert scale_scores(tensor([1.0, -8.0]), moments, clip=3.0).tolist() == [0.5, -3.0]
    assert scale_scores(tensor([NAN]), moments, clip=3.0).isnan().all()
    assert scale_scores(tensor([7.0]), RunningMoments(), clip=None).tolist() == [7.0]
    assert scale_scores(tensor([7.0]), None, clip=None).tolist() == [7.0]
    assert torch.equal(scale_scores(tensor([7.0]), RunningMoments(count=2, mean=1.0), clip=None), tensor([7.0]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_or_no_tokens_have_no_slot_for_a_score(shape: tuple[int, int]) -> None:
    assert spread_scores(torch.ones(shape[0]), torch.zeros(shape, dtype=torch.bool)).shape == shape
