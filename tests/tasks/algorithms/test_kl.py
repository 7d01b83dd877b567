import math

import pytest
import torch
from torch import tensor

from tasks.algorithms.kl import kl_per_token, update_kl_coef

ALL = ["k1", "k2", "k3", "k1-straight-through", "k3-straight-through"]


def one(log_prob: float, ref: float, estimator: str) -> float:
    mask = torch.ones(1, 1, dtype=torch.bool)
    return float(kl_per_token(tensor([[log_prob]]), tensor([[ref]]), mask, estimator=estimator))


def gradient(log_prob: float, ref: float, estimator: str, dtype: torch.dtype = torch.float32) -> float:
    x = tensor([[log_prob]], dtype=dtype, requires_grad=True)
    kl = kl_per_token(x, tensor([[ref]], dtype=dtype), torch.ones(1, 1, dtype=torch.bool), estimator=estimator)
    kl.sum().backward()
    assert x.grad is not None
    return float(x.grad)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 1.0), ("k2", 0.5), ("k3", 0.3678794), ("k1-straight-through", 1.0), ("k3-straight-through", 0.3678794)],
)
def test_estimators_by_hand_in_the_right_argument_order(estimator: str, expected: float) -> None:
    assert one(-1.0, -2.0, estimator) == pytest.approx(expected, abs=1e-6)
    assert one(-2.0, -1.0, "k3") == pytest.approx(0.7182818, abs=1e-6), "what swapped arguments would give"
    assert one(-1.5, -1.5, estimator) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("gap", [100.0, 90.0, -100.0, math.inf])
def test_value_and_gradient_stay_finite_at_absurd_gaps(estimator: str, gap: float, dtype: torch.dtype) -> None:
    assert math.isfinite(one(-1.0, -1.0 + gap, estimator))
    assert math.isfinite(gradient(-1.0, -1.0 + gap, estimator, dtype))


def test_k3_is_capped_where_clamping_after_exp_would_give_a_nan_gradient() -> None:
    assert one(-100.0, 0.0, "k3") == 10.0
    assert gradient(-100.0, 0.0, "k3") == 0.0
    x = tensor(-100.0, requires_grad=True)
    ((-x).exp() - 1 + x).clamp(max=10).backward()
    assert x.grad is not None
    assert x.grad.isnan(), "the faulty form this test must tell apart"


def test_straight_through_has_the_gradient_of_k2() -> None:
    for estimator in ("k2", "k1-straight-through", "k3-straight-through"):
        assert gradient(-1.0, -2.0, estimator) == pytest.approx(1.0)
    assert gradient(-1.0, -2.0, "k1") == 1.0
    assert gradient(-1.0, -2.0, "k3") == pytest.approx(1 - math.exp(-1.0))


def test_the_gradient_of_k2_is_that_of_the_kl_and_the_gradient_of_k1_is_zero_on_average() -> None:
    logits = tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    ref = tensor([0.1, 0.4, -0.3, 0.0], dtype=torch.float64).log_softmax(-1)
    log_probs, probs = logits.log_softmax(-1), logits.softmax(-1).detach()
    exact = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits, retain_graph=True)[0]
    mask = torch.ones(1, 4, dtype=torch.bool)
    expected = {}
    for estimator in ("k1", "k2"):
        kl = kl_per_token(log_probs[None], ref[None], mask, estimator=estimator)
        expected[estimator] = torch.autograd.grad((probs * kl[0]).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(expected["k2"], exact)
    torch.testing.assert_close(expected["k1"], torch.zeros_like(exact))


def test_k1_and_k3_average_to_the_exact_kl() -> None:
    log_p = tensor([[0.3, -0.2, 0.5]], dtype=torch.float64).log_softmax(-1)
    log_q = tensor([[0.1, 0.4, -0.3]], dtype=torch.float64).log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    mask = torch.ones(1, 3, dtype=torch.bool)
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((log_p.exp() * kl_per_token(log_p, log_q, mask, estimator=estimator)).sum(), exact)


def test_padding_with_nan_adds_nothing_and_a_nan_on_a_token_comes_out() -> None:
    x = tensor([[-1.0, math.nan]], requires_grad=True)
    mask = tensor([[True, False]])
    kl = kl_per_token(x, tensor([[-2.0, math.nan]]), mask, estimator="k3")
    kl.sum().backward()
    assert x.grad is not None
    assert kl[0, 1] == 0.0
    assert x.grad[0, 1] == 0.0
    assert x.grad.isfinite().all()
    assert kl_per_token(x, x.detach(), ~mask, estimator="k3")[0, 1].isnan()


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'k4'; known are"):
        one(0.0, 0.0, "k4")


def test_the_controller_by_hand() -> None:
    assert update_kl_coef(0.1, 2.0, target=1.0, horizon=100.0, num_sequences=10) == pytest.approx(0.102)
    assert update_kl_coef(0.1, 0.9, target=1.0, horizon=100.0, num_sequences=10) == pytest.approx(0.099)


def test_the_controller_rests_on_target_and_would_drift_if_masked_rows_counted_as_zero() -> None:
    on_target, diluted = 0.2, 0.2
    for _ in range(200):
        on_target = update_kl_coef(on_target, 0.4, target=0.4, horizon=10_000, num_sequences=8)
        diluted = update_kl_coef(diluted, 0.3, target=0.4, horizon=10_000, num_sequences=8)
    assert on_target == pytest.approx(0.2)
    assert diluted == pytest.approx(0.1937008, abs=1e-6)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 100.0), (1.0, 0.0), (-1.0, 100.0), (1.0, -5.0)])
def test_the_controller_refuses_targets_and_horizons_that_are_not_positive(target: float, horizon: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        update_kl_coef(0.1, 1.0, target=target, horizon=horizon, num_sequences=1)


def test_the_controller_refuses_a_kl_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="measured KL is nan"):
        update_kl_coef(0.1, math.nan, target=1.0, horizon=100.0, num_sequences=1)


def test_a_target_of_nan_is_not_positive_and_a_horizon_too_short_would_turn_the_coefficient_negative() -> None:
    with pytest.raises(ValueError, match="target nan"):
        update_kl_coef(0.1, 1.0, target=math.nan, horizon=10.0, num_sequences=1)
    with pytest.raises(ValueError, match=r"horizon 1\.0 and 10 sequences a step; .* above 0\.2 x 10"):
        update_kl_coef(0.1, 0.0, target=1.0, horizon=1.0, num_sequences=10)
    assert update_kl_coef(0.1, 9.0, target=1.0, horizon=1.0, num_sequences=10) == pytest.approx(0.3)
