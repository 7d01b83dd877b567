import math

import pytest
import torch
from torch import Tensor, tensor

from tasks.algorithms.losses import aggregate_loss
from tasks.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo_loss,
    clip_cov_loss,
    decoupled_ppo_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    importance_weighted_loss,
    kl_cov_loss,
    ppo_loss,
    sapo_loss,
)

NAN = math.nan
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
KNOBS: dict[str, dict] = {
    "ppo": CLIP | {"clip_ratio_dual": 3.0},
    "decoupled_ppo": CLIP,
    "gspo": CLIP,
    "gmpo": CLIP,
    "cispo": CLIP,
    "sapo": {},
    "gpg": {},
    "clip_cov": CLIP,
    "kl_cov": {"covariance_kl_coef": 1.0},
    "distillation": {},
}
every_loss = pytest.mark.parametrize("name", KNOBS)


def evaluate(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, dict]:
    columns = {}
    if name == "decoupled_ppo":
        columns["rollout_log_probs"] = old
    if name in ("clip_cov", "kl_cov"):
        columns["selected_mask"] = torch.zeros_like(mask).index_fill(1, tensor([0]), name == "kl_cov")
    return POLICY_LOSSES[name](log_probs, old, advantages, mask, **columns, **KNOBS[name])


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def log_ratio_of(*ratios: float) -> Tensor:
    return tensor([ratios]).log()


@every_loss
def test_padding_of_nan_and_inf_reaches_neither_loss_nor_metric_nor_gradient(name: str) -> None:
    mask = tensor([[False, True, True, False], [True, False, False, False], [False] * 4])
    clean = torch.linspace(-3, -0.1, 12).view(3, 4)
    dirty = clean.masked_fill(~mask, NAN).index_fill(1, tensor([3]), math.inf)
    results = []
    for filled in (clean, dirty):
        x = filled.clone().requires_grad_()
        losses, metrics = evaluate(name, x, filled - 0.1, filled + 1.5, mask)
        gradient = torch.autograd.grad(losses.where(mask, 0.0).sum(), x)[0]
        results.append((losses.detach().where(mask, 0.0), gradient, metrics))
        assert not gradient[~mask].any()
    torch.testing.assert_close(results[0], results[1])


@every_loss
def test_a_nan_log_prob_on_a_trained_token_comes_out_as_nan(name: str) -> None:
    x = tensor([[-1.0, NAN]])
    losses, _ = evaluate(name, x, tensor([[-1.0, -1.0]]), tensor([[1.0, 1.0]]), ones(1, 2))
    assert losses.isnan().any()


@every_loss
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_absurd_ratios_have_finite_losses_and_gradients(name: str, advantage: float, gap: float) -> None:
    x = tensor([[gap, 0.0]], requires_grad=True)
    losses, _ = evaluate(name, x, torch.zeros(1, 2), tensor([[advantage, advantage]]), ones(1, 2))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in KNOBS if name != "clip_cov"])
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name: str) -> None:
    """Whatever the algorithm, the first step on-policy moves along A * grad log_probs."""
    old = tensor([[-1.0, -2.0, -0.5], [-0.3, -1.1, -9.0]])
    mask, advantages = tensor([[True] * 3, [True, True, False]]), tensor([[0.7] * 3, [-0.4] * 3])
    x = old.clone().requires_grad_()
    losses, _ = evaluate(name, x, old, advantages, mask)
    aggregate_loss(losses, mask, aggregation="seq-mean-token-mean", num_response_tokens=5, num_sequences=2).backward()
    expected = tensor([[-0.7 / 3] * 3, [0.4 / 2, 0.4 / 2, 0.0]]) / 2
    torch.testing.assert_close(x.grad, expected, atol=1e-6, rtol=1e-5)


def test_dual_clip_bounds_an_overflowing_ratio() -> None:
    x = torch.full((1, 3), 1000.0, requires_grad=True)
    arguments = (x, torch.zeros(1, 3), tensor([[0.0, 1.0, -1.0]]), ones(1, 3))
    losses, _ = ppo_loss(*arguments, **CLIP, clip_ratio_dual=3.0)
    assert losses.tolist() == [pytest.approx([0.0, -1.2, 3.0])]
    open_ended, _ = ppo_loss(*arguments, **CLIP)
    assert open_ended[0, 2].item() == pytest.approx(math.exp(20.0), rel=1e-5)


def test_ppo_clips_on_its_pessimistic_side_only() -> None:
    ratios, advantages = (0.5, 0.5, 1.5, 1.5), tensor([[1.0, -1.0, 1.0, -1.0]])
    losses, metrics = ppo_loss(
        log_ratio_of(*ratios), torch.zeros(1, 4), advantages, ones(1, 4), clip_ratio_low=0.2, clip_ratio_high=0.3
    )
    assert losses.tolist() == [pytest.approx([-0.5, 0.8, -1.3, 1.5])]
    assert metrics["actor/clip_fraction"] == 2.0
    assert metrics["actor/clip_fraction/count"] == 4.0


def test_decoupled_ppo_weighs_back_to_the_sampling_policy_without_gradient() -> None:
    x = log_ratio_of(1.1, 1.1).requires_grad_()
    rollout = -log_ratio_of(2.0, 50.0)
    losses, metrics = decoupled_ppo_loss(
        x, torch.zeros(1, 2), tensor([[1.0, 1.0]]), ones(1, 2), rollout_log_probs=rollout, **CLIP
    )
    assert losses.tolist() == [pytest.approx([-2.2, -5.5])], "the second weight is capped at 5"
    assert metrics["actor/behaviour_weight"] == pytest.approx(52.0)
    losses.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [pytest.approx([-2.2, -5.5])]


def test_gspo_takes_the_mean_over_the_valid_length() -> None:
    x, mask = tensor([[0.2, 0.4, 0.0, 0.0]], requires_grad=True), tensor([[True, True, False, False]])
    losses, _ = gspo_loss(x, torch.zeros(1, 4), torch.full((1, 4), -1.0), mask, clip_ratio_low=0.5, clip_ratio_high=0.5)
    assert losses[mask].tolist() == pytest.approx([1.349859, 1.349859], abs=1e-6)
    assert losses[0, 0].item() != pytest.approx(1.822119, abs=1e-2), "the sum"
    assert losses[0, 0].item() != pytest.approx(1.161834, abs=1e-2), "the mean over the padded width"


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    x = tensor([[0.02, 0.04, -0.01]], dtype=torch.float64, requires_grad=True)
    arguments = torch.zeros_like(x), torch.full_like(x, 0.8), ones(1, 3)
    losses, _ = gspo_loss(x, *arguments, **CLIP)
    got = torch.autograd.grad(losses.mean(), x)[0]
    expected = torch.autograd.grad(-0.8 * x.mean().exp(), x)[0]
    torch.testing.assert_close(got, expected)


def test_gspo_clips_the_whole_sequence() -> None:
    x = tensor([[0.5, 0.5]], requires_grad=True)
    losses, metrics = gspo_loss(x, torch.zeros(1, 2), torch.ones(1, 2), ones(1, 2), **CLIP)
    losses.sum().backward()
    assert losses.tolist() == [pytest.approx([-1.2, -1.2])]
    assert x.grad is not None
    assert not x.grad.any()
    assert metrics["actor/clip_fraction"] == 2.0


def test_gmpo_clips_each_token_in_log_space_on_its_pessimistic_side() -> None:
    x = tensor([[0.6, -0.6, 0.1]])
    bounds = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    up, _ = gmpo_loss(x, torch.zeros(1, 3), torch.ones(1, 3), ones(1, 3), **bounds)
    down, _ = gmpo_loss(x, torch.zeros(1, 3), -torch.ones(1, 3), ones(1, 3), **bounds)
    assert up.tolist() == [pytest.approx([-math.exp((0.4 - 0.6 + 0.1) / 3)] * 3)]
    assert down.tolist() == [pytest.approx([math.exp((0.6 - 0.4 + 0.1) / 3)] * 3)]


def test_gmpo_gradient_is_that_of_the_geometric_mean() -> None:
    x = tensor([[0.02, 0.04, -0.01]], dtype=torch.float64, requires_grad=True)
    losses, _ = gmpo_loss(x, torch.zeros_like(x), torch.full_like(x, 0.8), ones(1, 3), **CLIP)
    got = torch.autograd.grad(losses.mean(), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad(-0.8 * x.exp().prod() ** (1 / 3), x)[0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    x = tensor([[math.log(3.0), math.log(0.01)]], requires_grad=True)
    losses, metrics = cispo_loss(
        x, torch.zeros(1, 2), torch.ones(1, 2), ones(1, 2), clip_ratio_low=10.0, clip_ratio_high=0.2
    )
    losses.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [pytest.approx([-1.2, -0.01])]
    assert metrics["actor/clip_fraction"] == 1.0


def test_sapo_by_hand_with_its_own_temperature_for_each_sign() -> None:
    losses, _ = sapo_loss(log_ratio_of(1.5, 1.5), torch.zeros(1, 2), tensor([[1.0, -2.0]]), ones(1, 2))
    up = 4.0 / (1 + math.exp(-0.5))
    down = 4.0 / 1.05 / (1 + math.exp(-1.05 * 0.5))
    assert losses.tolist() == [pytest.approx([-up, 2 * down])]


def test_gpg_is_minus_advantage_times_log_prob() -> None:
    losses, _ = gpg_loss(tensor([[-2.0, -3.0]]), torch.zeros(1, 2), tensor([[0.5, -1.0]]), ones(1, 2))
    assert losses.tolist() == [[1.0, -3.0]]


def test_clip_cov_silences_the_selected_tokens() -> None:
    x = log_ratio_of(1.1, 1.1).requires_grad_()
    losses, metrics = clip_cov_loss(
        x, torch.zeros(1, 2), torch.ones(1, 2), ones(1, 2), selected_mask=tensor([[True, False]]), **CLIP
    )
    losses.sum().backward()
    assert losses.tolist() == [pytest.approx([0.0, -1.1])]
    assert x.grad is not None
    assert x.grad[0, 0] == 0.0
    assert metrics["actor/selected"] == 1.0


def test_kl_cov_holds_back_the_selected_tokens_and_clips_none() -> None:
    losses, _ = kl_cov_loss(
        log_ratio_of(2.0, 2.0),
        torch.zeros(1, 2),
        torch.ones(1, 2),
        ones(1, 2),
        selected_mask=tensor([[True, False]]),
        covariance_kl_coef=3.0,
    )
    assert losses.tolist() == [pytest.approx([3 * math.log(2.0) - 2.0, -2.0])]


def test_the_importance_weighted_loss_is_unclipped() -> None:
    losses, _ = importance_weighted_loss(log_ratio_of(3.0), torch.zeros(1, 1), tensor([[2.0]]), ones(1, 1))
    assert losses.tolist() == [pytest.approx([-6.0])]


def test_a_ratio_on_padding_made_of_two_sentinels_counts_nowhere() -> None:
    """Padding of 1 in one tensor and 0 in the other would be a ratio of e."""
    mask = tensor([[True, True, False]])
    losses, metrics = ppo_loss(tensor([[-1.0, -2.0, 1.0]]), tensor([[-1.0, -2.0, 0.0]]), torch.ones(1, 3), mask, **CLIP)
    assert losses[mask].tolist() == [-1.0, -1.0]
    assert metrics["actor/clip_fraction"] == 0.0
    assert metrics["actor/clip_fraction/count"] == 2.0
