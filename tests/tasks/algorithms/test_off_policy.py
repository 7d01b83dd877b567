import math

import pytest
import torch
from torch import Tensor, tensor

from tasks.algorithms.diagnostics import finish_metrics
from tasks.algorithms.losses import aggregate_loss
from tasks.algorithms.off_policy import CORRECTIONS, rollout_correction

NAN = math.nan


def correct(log_ratio: Tensor, mode: str, lower: float, upper: float, mask: Tensor | None = None) -> tuple:
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    return rollout_correction(log_ratio, torch.zeros_like(log_ratio), mask, mode=mode, lower=lower, upper=upper)


def test_rejected_tokens_leave_the_denominator() -> None:
    weights, keep, metrics = correct(tensor([[0.1, -1.5, 0.8, -10.0, 0.3]]), "icepop", 0.5, 2.0)
    assert keep.tolist() == [[True, False, False, False, True]]
    loss = aggregate_loss(
        torch.ones(1, 5) * weights,
        keep,
        aggregation="token-mean",
        num_response_tokens=keep.sum(),
        num_sequences=keep.any(dim=1).sum(),
    )
    assert loss.item() == pytest.approx(1.227515, abs=1e-6)
    assert float(weights.sum() / 5) == pytest.approx(0.4910059, abs=1e-6), "the rejected ones left in"
    assert finish_metrics(metrics)["rollout/rejected_fraction"] == pytest.approx(0.6)


def test_token_weights_are_truncated() -> None:
    weights, keep, _ = correct(
        tensor([[0.0, math.log(1.5), math.log(9.0), math.log(0.01)]]), "token-truncate", 0.1, 2.0
    )
    assert weights.tolist() == [pytest.approx([1.0, 1.5, 2.0, 0.1])]
    assert keep.all()


def test_the_geometric_weight_does_not_collapse_with_length_and_the_summed_one_does() -> None:
    drift = torch.full((1, 1000), -0.00282)
    geometric, _, metrics = correct(drift, "geometric-truncate", 0.0, 2.0)
    summed, _, _ = correct(drift, "sequence-truncate", 0.0, 2.0)
    assert geometric[0, 0].item() == pytest.approx(0.997184, abs=1e-5)
    assert summed[0, 0].item() == pytest.approx(0.0596059, abs=1e-5)
    assert finish_metrics(metrics)["rollout/log_prob_gap"] == pytest.approx(0.00282, rel=1e-4)


def test_the_means_before_and_after_the_clamp_are_both_reported() -> None:
    metrics = finish_metrics(correct(tensor([[math.log(6.0), 0.0]]), "token-truncate", 0.0, 2.0)[2])
    assert metrics["rollout/correction_weight"] == pytest.approx(3.5)
    assert metrics["rollout/correction_weight_clamped"] == pytest.approx(1.5)


def test_the_length_is_that_of_the_mask() -> None:
    mask = tensor([[True, True, False, False]])
    weights, _, _ = correct(tensor([[0.2, 0.4, NAN, math.inf]]), "geometric-truncate", 0.0, 9.0, mask)
    assert weights.tolist() == [pytest.approx([math.exp(0.3), math.exp(0.3), 0.0, 0.0])]


@pytest.mark.parametrize(
    ("mode", "bounds", "kept"),
    [
        ("reject-k1", (0.9, 1.1), [True, False, True]),
        ("reject-k2", (0.0, 0.01), [True, False, False]),
        ("reject-k3", (0.0, 0.01), [True, False, False]),
    ],
)
def test_rejection_drops_whole_rows(mode: str, bounds: tuple[float, float], kept: list[bool]) -> None:
    """Row 2 has deviations that cancel in k1 and show in k2 and k3."""
    weights, keep, _ = correct(tensor([[0.01, 0.01], [0.5, 0.5], [0.5, -0.5]]), mode, *bounds)
    assert keep.tolist() == [[row, row] for row in kept]
    assert torch.equal(weights, keep.float())


def test_the_rejection_uses_the_kl_of_the_samples_own_direction() -> None:
    gap = 0.5  # KL(rollout || old) by k3 is e^d - 1 - d
    just_above, just_below = math.expm1(gap) - gap + 1e-4, math.expm1(gap) - gap - 1e-4
    assert correct(tensor([[gap]]), "reject-k3", 0.0, just_above)[1].all()
    assert not correct(tensor([[gap]]), "reject-k3", 0.0, just_below)[1].any()


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_equal_log_probs_need_no_correction(mode: str) -> None:
    weights, keep, _ = correct(torch.zeros(2, 3), mode, 0.5, 2.0)
    assert weights.tolist() == [[1.0] * 3] * 2
    assert keep.all()


def test_a_nan_log_prob_is_not_hidden_by_a_weight() -> None:
    assert correct(tensor([[NAN, 0.0]]), "token-truncate", 0.0, 2.0)[0][0, 0].isnan()


def test_bad_modes_and_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="'tis'; known are"):
        correct(torch.zeros(1, 1), "tis", 0.0, 2.0)
    with pytest.raises(ValueError, match=r"bounds are \[3.0, 2.0\]"):
        correct(torch.zeros(1, 1), "icepop", 3.0, 2.0)


@pytest.mark.parametrize("mode", [mode for mode in CORRECTIONS if mode != "off"])
def test_a_nan_log_prob_is_never_quietly_rejected(mode: str) -> None:
    weights, keep, _ = correct(tensor([[NAN, 0.0], [0.0, 0.0]]), mode, 0.5, 2.0)
    assert keep[0, 0]
    assert weights[0, 0].isnan()
    assert weights[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_row_without_a_token_has_no_weight_and_no_nan(mode: str) -> None:
    mask = tensor([[False, False], [True, True]])
    weights, keep, metrics = correct(tensor([[NAN, math.inf], [0.0, 0.0]]), mode, 0.5, 2.0, mask)
    assert weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert keep.tolist() == [[False, False], [True, True]]
    assert all(math.isfinite(value) for value in finish_metrics(metrics).values())
