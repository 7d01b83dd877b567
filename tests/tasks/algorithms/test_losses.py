import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks.algorithms.losses import AGGREGATIONS, aggregate_loss, value_losses

NAN = math.nan
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def rows(*lists: list[float]) -> tuple[Tensor, Tensor]:
    """Right-padded with nan, so that any leak shows."""
    width = max(len(row) for row in lists)
    losses = tensor([row + [NAN] * (width - len(row)) for row in lists])
    return losses, ~losses.isnan()


def total(aggregation: str, *micro_batches: tuple[Tensor, Tensor], tokens: int, sequences: int) -> Tensor:
    parts = [
        aggregate_loss(
            losses,
            mask,
            aggregation=aggregation,
            num_response_tokens=tokens,
            num_sequences=sequences,
            max_response_length=8,
        )
        for losses, mask in micro_batches
    ]
    return torch.stack(parts).sum()


def test_token_mean_is_over_all_tokens_of_the_step_and_not_a_mean_of_micro_batches() -> None:
    large = (torch.full((1, 100), 2.0), torch.ones(1, 100, dtype=torch.bool))
    larger = (torch.full((1, 900), 0.5), torch.ones(1, 900, dtype=torch.bool))
    assert total("token-mean", large, larger, tokens=1000, sequences=2) == pytest.approx(0.65)
    assert total("token-mean", rows([4.0]), rows([1.0, 1.0, 1.0]), tokens=4, sequences=2) == pytest.approx(1.75)


def test_sequence_mean_with_an_uneven_last_micro_batch() -> None:
    got = total("seq-mean-token-mean", rows([1.0, 1.0], [2.0]), rows([6.0]), tokens=4, sequences=3)
    assert got == pytest.approx(3.0)


def test_the_constant_normaliser_is_the_configured_length_in_every_layout() -> None:
    whole = rows([1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    split = rows([1.0, 1.0]), rows([1.0, 1.0, 1.0, 1.0])
    for layout in ((whole,), split):
        assert total("seq-mean-token-sum-norm", *layout, tokens=6, sequences=2) == pytest.approx(0.375)


def test_the_other_aggregations_by_hand() -> None:
    batch = rows([1.0, 3.0], [5.0])
    assert total("token-sum", batch, tokens=3, sequences=2) == 9.0
    assert total("seq-mean-token-sum", batch, tokens=3, sequences=2) == 4.5


@every_aggregation
def test_nothing_valid_gives_loss_zero_and_gradient_zero(aggregation: str) -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    loss = total(aggregation, (weight * 1.0, torch.zeros(2, 3, dtype=torch.bool)), tokens=0, sequences=0)
    loss.backward()
    assert loss == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_four_accumulation_steps_give_the_gradient_of_one(aggregation: str) -> None:
    slopes = tensor([[1.0], [2.0], [3.0], [6.0]])
    gradients = []
    for size in (4, 1):
        weight = tensor(1.0, requires_grad=True)
        for part in slopes.split(size):
            mask = torch.ones_like(part, dtype=torch.bool)
            total(aggregation, (part * weight, mask), tokens=4, sequences=4).backward()
        assert weight.grad is not None
        gradients.append(float(weight.grad))
    assert gradients == pytest.approx([3.0, 3.0])


@every_aggregation
@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), cut=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_the_whole_is_the_sum_of_its_micro_batches_in_loss_and_gradient(aggregation, lengths, cut, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(len(lengths), 6, dtype=torch.float64, generator=generator)
    mask = torch.arange(6)[None] < tensor(lengths)[:, None]
    counts = {"tokens": sum(lengths), "sequences": sum(n > 0 for n in lengths)}
    results = []
    for pieces in ([slice(None)], [slice(cut), slice(cut, None)]):
        x = losses.clone().requires_grad_()
        loss = total(aggregation, *[(x[p], mask[p]) for p in pieces], **counts)
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_aggregation_names_are_checked() -> None:
    batch = rows([1.0])
    with pytest.raises(ValueError, match="'mean'; known are"):
        total("mean", batch, tokens=1, sequences=1)
    with pytest.raises(ValueError, match="needs max_response_length"):
        aggregate_loss(*batch, aggregation="seq-mean-token-sum-norm", num_response_tokens=1, num_sequences=1)


@pytest.mark.parametrize(("old", "new", "expected"), [(5.0, 1.0, 40.5), (1.0, 5.0, 38.72)])
def test_the_clipped_value_loss_takes_the_larger_error(old: float, new: float, expected: float) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    losses, moved = value_losses(tensor([[new]]), tensor([[old]]), tensor([[10.0]]), mask, value_clip=0.2)
    assert losses.item() == pytest.approx(expected, abs=1e-4)
    assert moved.item()


def test_the_value_clip_fraction_is_measured_before_the_clip() -> None:
    old, new = torch.zeros(1, 4), tensor([[0.1, 0.3, -0.5, 0.2]])
    _, moved = value_losses(new, old, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), value_clip=0.2)
    assert moved.tolist() == [[False, True, True, False]]


def test_the_value_loss_without_clip_is_half_the_squared_error_and_ignores_padding() -> None:
    values = tensor([[1.0, NAN]], requires_grad=True)
    padding = tensor([[3.0, NAN]])
    losses, moved = value_losses(values, padding, padding, tensor([[True, False]]), value_clip=None)
    losses.sum().backward()
    assert losses.tolist() == [[2.0, 0.0]]
    assert not moved.any()
    assert values.grad is not None
    assert values.grad.tolist() == [[-2.0, 0.0]]
