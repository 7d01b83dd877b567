import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from tasks.algorithms.masking import masked_mean, masked_sum, whiten, zero_masked

NAN = math.nan


def test_reductions_ignore_nan_and_inf_in_masked_positions() -> None:
    x, mask = tensor([[1.0, NAN, 3.0], [math.inf, 5.0, NAN]]), tensor([[True, False, True], [False, True, False]])
    assert masked_sum(x, mask) == 9.0
    assert masked_mean(x, mask) == 3.0
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 5.0]


def test_a_nan_at_a_position_that_counts_is_not_hidden() -> None:
    x, mask = tensor([1.0, NAN]), tensor([True, True])
    assert masked_sum(x, mask).isnan()
    assert masked_mean(x, mask).isnan()
    assert whiten(x, mask).isnan().all()


def test_the_gradient_of_a_masked_position_is_exactly_zero_though_it_holds_nan() -> None:
    x = tensor([2.0, NAN], requires_grad=True)
    (masked_sum(x, tensor([True, False])) ** 2).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 0.0]


def test_nothing_valid_has_mean_zero_and_gradient_zero() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = masked_mean(x, mask)
    loss.backward()
    assert loss == 0.0
    assert x.grad is not None
    assert not x.grad.any()
    assert whiten(x.detach(), mask).tolist() == [[0.0] * 3] * 2


def test_whitening_one_valid_token_gives_zero_and_not_nan() -> None:
    assert whiten(tensor([3.0, 7.0]), tensor([True, False])).tolist() == [0.0, 0.0]


def test_whitening_equal_values_gives_exactly_zero() -> None:
    x = torch.full((7,), 0.1)
    naive = (x - x.mean()) / (x.std() + 1e-8)
    assert whiten(x, torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7
    assert naive.abs().max() > 1e-3, "the plain formula turns rounding into advantages; this test would not see it"


def test_whitening_by_hand() -> None:
    got = whiten(tensor([1.0, 2.0, NAN, 3.0]), tensor([True, True, False, True]))
    assert got.tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0], abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_whitening_does_not_see_the_order_and_gives_mean_zero(values: list[float], random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    mask = torch.ones(len(values), dtype=torch.bool)
    white = whiten(tensor(values), mask)
    assert whiten(tensor(values)[order], mask).tolist() == pytest.approx(white[order].tolist(), abs=1e-5)
    assert abs(float(white.mean())) < 1e-4
    assert white.isfinite().all()


def test_zero_masked_keeps_shape_and_dtype() -> None:
    assert zero_masked(torch.ones(2, dtype=torch.bfloat16), tensor([True, False])).dtype is torch.bfloat16
