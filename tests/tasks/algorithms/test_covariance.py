import math

import torch
from torch import tensor

from tasks.algorithms.covariance import select_clip_cov, select_kl_cov, token_covariance

NAN = math.nan


def test_the_covariance_of_tokens_by_hand_without_the_padding() -> None:
    mask = tensor([[True, True, False], [True, False, False]])
    got = token_covariance(
        tensor([[-1.0, -3.0, NAN], [-2.0, NAN, NAN]]), tensor([[2.0, -1.0, NAN], [2.0, NAN, NAN]]), mask
    )
    torch.testing.assert_close(got, tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))


def test_kl_cov_takes_the_largest_and_at_least_one() -> None:
    covariance, mask = tensor([[0.1, 3.0, 9.0], [2.0, 1.0, 0.0]]), tensor([[True, True, False], [True, True, True]])
    assert select_kl_cov(covariance, mask, fraction=0.4).tolist() == [[False, True, False], [True, False, False]]
    assert select_kl_cov(covariance, mask, fraction=1e-9).sum() == 1
    assert not select_kl_cov(covariance, mask & False, fraction=0.5).any()


def test_clip_cov_draws_between_its_bounds_whatever_the_order_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    covariance = torch.randn(20, 30, generator=generator) * 3
    mask, row_ids = torch.rand(20, 30, generator=generator) < 0.8, torch.arange(100, 120)

    def draw(order: torch.Tensor, seed: int) -> torch.Tensor:
        return select_clip_cov(
            covariance[order], mask[order], row_ids[order], fraction=0.05, lower=1.0, upper=5.0, seed=seed
        )

    straight, order = draw(torch.arange(20), 7), torch.randperm(20, generator=generator)
    assert int(straight.sum()) == int(0.05 * int(mask.sum()))
    assert mask[straight].all()
    assert ((covariance > 1) & (covariance < 5))[straight].all()
    assert torch.equal(draw(order, 7), straight[order])
    assert not torch.equal(draw(torch.arange(20), 8), straight)


def test_clip_cov_takes_nothing_when_no_token_lies_between_the_bounds() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = select_clip_cov(torch.zeros(1, 3), mask, tensor([0]), fraction=0.5, lower=1.0, upper=5.0, seed=0)
    assert not got.any()
