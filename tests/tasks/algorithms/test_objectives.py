"""The objectives against an oracle written plainly in float64, one token at a time."""

import functools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from resources.workers.metric_sums import MetricSums
from tasks.algorithms.diagnostics import finish_metrics
from tasks.algorithms.objectives import actor_objective, critic_objective, policy_loss_knobs
from tasks.algorithms.policy_losses import POLICY_LOSSES

LENGTHS = (4, 1, 0, 6, 3)
WIDTH = 6


def micro_batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Five rows of a mini-batch, one without a token, with nan wherever nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH)[None] < tensor(LENGTHS)[:, None]
    mask[3, 2] = False  # a tool token inside a response

    def column(scale: float, shift: float = 0.0) -> Tensor:
        noise = torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
        return (noise * scale + shift).masked_fill(~mask, math.nan).to(dtype)

    old = column(0.5, -2.0)
    return {
        "old_log_probs": old,
        "log_probs": old + column(0.3),
        "ref_log_probs": old + column(0.3),
        "teacher_log_probs": old + column(0.3),
        "rollout_log_probs": old + column(0.1),
        "advantages": column(1.0),
        "entropy": column(0.1, 1.0),
        "values": column(1.0),
        "new_values": column(1.0),
        "returns": column(1.0),
        "selected_mask": mask & (torch.rand(mask.shape, generator=generator) < 0.4),
        "response_mask": mask,
        "num_response_tokens": mask.sum(),
        "num_sequences": mask.any(dim=1).sum(),
    }


def rows_of(td: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: column[rows] if column.ndim == 2 else column for name, column in td.items()}


def oracle_ppo(td: dict[str, Tensor], low: float, high: float, dual: float, beta: float, bonus: float) -> float:
    """PPO with dual clip, k3 to the reference and an entropy bonus, as the papers write it, token-mean."""
    columns = {name: column.numpy() for name, column in td.items()}
    total, count = 0.0, 0
    for b in range(len(LENGTHS)):
        for t in range(WIDTH):
            if not columns["response_mask"][b, t]:
                continue
            new, advantage = columns["log_probs"][b, t], columns["advantages"][b, t]
            ratio = np.exp(new - columns["old_log_probs"][b, t])
            objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            if advantage < 0:
                objective = max(objective, dual * advantage)
            to_reference = columns["ref_log_probs"][b, t] - new
            kl = np.exp(to_reference) - 1 - to_reference
            total += -objective + beta * kl - bonus * columns["entropy"][b, t]
            count += 1
    return total / count


def test_ppo_equals_the_oracle() -> None:
    td = micro_batch()
    loss, _ = actor_objective(
        td["log_probs"],
        td["entropy"],
        td,
        policy_loss="ppo",
        aggregation="token-mean",
        entropy_coef=0.01,
        kl_coef=0.05,
        kl_estimator="k3",
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        clip_ratio_dual=1.2,
    )
    assert loss.item() == pytest.approx(oracle_ppo(td, 0.1, 0.15, 1.2, 0.05, 0.01), rel=1e-12)


def test_the_gradient_of_ppo_equals_the_oracles_finite_difference() -> None:
    td = micro_batch()
    x = td["log_probs"].clone().requires_grad_()
    loss, _ = actor_objective(
        x,
        td["entropy"],
        td,
        policy_loss="ppo",
        aggregation="token-mean",
        kl_coef=0.05,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        clip_ratio_dual=1.2,
    )
    loss.backward()
    step = 1e-6
    for b, t in td["response_mask"].nonzero().tolist():
        moved = []
        for sign in (1, -1):
            shifted = td["log_probs"].clone()
            shifted[b, t] += sign * step
            moved.append(oracle_ppo(td | {"log_probs": shifted}, 0.1, 0.15, 1.2, 0.05, 0.0))
        assert x.grad is not None
        assert x.grad[b, t].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)
    assert x.grad is not None
    assert not x.grad[~td["response_mask"]].any()


def test_the_critic_equals_the_oracle() -> None:
    td = micro_batch()
    loss, metrics = critic_objective(td["new_values"], td, value_clip=0.3)
    total, clipped = 0.0, 0
    for b, t in td["response_mask"].nonzero().tolist():
        new, old, target = (float(td[name][b, t]) for name in ("new_values", "values", "returns"))
        near = min(max(new, old - 0.3), old + 0.3)
        total += 0.5 * max((new - target) ** 2, (near - target) ** 2)
        clipped += abs(new - old) > 0.3
    assert loss.item() == pytest.approx(total / int(td["num_response_tokens"]), rel=1e-12)
    assert finish_metrics(metrics)["critic/clip_fraction"] == pytest.approx(clipped / int(td["num_response_tokens"]))


KNOBS: dict[str, dict[str, float]] = {
    name: {
        knob: value
        for knob, value in {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "covariance_kl_coef": 1.0}.items()
        if knob in policy_loss_knobs(name)
    }
    for name in POLICY_LOSSES
}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_algorithm_is_the_sum_of_its_micro_batches_in_loss_gradient_and_metrics(
    name: str, aggregation: str
) -> None:
    td = micro_batch()
    objective = functools.partial(
        actor_objective,
        policy_loss=name,
        aggregation=aggregation,
        entropy_coef=0.01,
        kl_coef=0.1,
        teacher_kl_coef=0.1,
        max_response_length=8,
        **KNOBS[name],
    )
    results = []
    for pieces in ([slice(None)], [slice(0, 2), slice(2, 3), slice(3, 5)]):
        x = td["log_probs"].clone().requires_grad_()
        parts = [objective(x[piece], td["entropy"][piece], rows_of(td, piece)) for piece in pieces]
        loss = torch.stack([loss for loss, _ in parts]).sum()
        sums = MetricSums("actor", is_first=True)
        for _, metrics in parts:
            sums.add(metrics)
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0], finish_metrics(sums.numbers())))
    torch.testing.assert_close(results[0][:2], results[1][:2])
    assert results[0][2] == pytest.approx(results[1][2])
    assert results[0][1].isfinite().all()
    assert results[0][1].any()


def test_metrics_are_detached_scalars() -> None:
    td = micro_batch()
    x = td["log_probs"].clone().requires_grad_()
    _, metrics = actor_objective(
        x, None, td, policy_loss="grpo", aggregation="token-mean", kl_coef=0.1, clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    assert all(value.ndim == 0 and not value.requires_grad for value in metrics.values())


def test_train_mask_rules_over_response_mask() -> None:
    td = micro_batch()
    train = td["response_mask"].clone()
    train[3] = False
    without = rows_of(td, slice(0, 3)), rows_of(td, slice(4, 5))
    arguments = {"policy_loss": "gpg", "aggregation": "token-sum"}
    loss, _ = actor_objective(td["log_probs"], None, td | {"train_mask": train}, **arguments)
    expected = sum(actor_objective(part["log_probs"], None, part, **arguments)[0] for part in without)
    torch.testing.assert_close(loss, expected)


def test_correction_weights_multiply_the_policy_loss_and_not_the_kl() -> None:
    td = micro_batch()
    arguments = {"policy_loss": "gpg", "aggregation": "token-mean"}
    doubled = td | {"correction_weights": torch.full_like(td["advantages"], 2.0)}
    plain, _ = actor_objective(td["log_probs"], None, td, **arguments)
    with_kl, _ = actor_objective(td["log_probs"], None, td, kl_coef=0.3, **arguments)
    weighted, _ = actor_objective(td["log_probs"], None, doubled, kl_coef=0.3, **arguments)
    torch.testing.assert_close(weighted, 2 * plain + (with_kl - plain))


def test_a_micro_batch_of_padding_alone_has_loss_zero_and_a_gradient_of_zeros() -> None:
    td = micro_batch() | {"response_mask": torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool)}
    x = td["log_probs"].clone().requires_grad_()
    loss, metrics = actor_objective(
        x, td["entropy"], td, policy_loss="gspo", aggregation="token-mean", kl_coef=1.0, **KNOBS["gspo"]
    )
    loss.backward()
    assert loss == 0.0
    assert x.grad is not None
    assert not x.grad.any()
    assert finish_metrics(metrics).keys() == {"actor/log_ratio/max"}, "no mean over nothing is reported"


def test_a_nan_log_prob_on_a_trained_token_makes_the_loss_nan() -> None:
    td = micro_batch()
    td["log_probs"][0, 0] = math.nan
    loss, _ = actor_objective(
        td["log_probs"], None, td, policy_loss="ppo", aggregation="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    assert loss.isnan()


def test_the_worked_example_of_two_responses() -> None:
    mask = tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    advantages = tensor([[0.5], [-0.5]]).expand(2, 5)
    td = {
        "response_mask": mask,
        "old_log_probs": torch.full((2, 5), -1.0),
        "advantages": advantages,
        "num_response_tokens": tensor(5),
        "num_sequences": tensor(2),
    }
    loss, metrics = actor_objective(
        td["old_log_probs"], None, td, policy_loss="grpo", aggregation="token-mean", **KNOBS["grpo"]
    )
    assert loss.item() == pytest.approx(-0.1)
    finished = finish_metrics(metrics)
    assert finished["actor/log_ratio/max"] == 0.0
    assert finished["actor/clip_fraction"] == 0.0
    assert finished["actor/policy_loss"] == pytest.approx(-0.1)


def test_a_loss_crosses_a_process_border_as_a_value() -> None:
    objective = functools.partial(actor_objective, policy_loss="gpg", aggregation="token-mean")
    assert pickle.loads(pickle.dumps(objective)).keywords == objective.keywords


def test_an_entropy_bonus_without_entropy_and_unknown_names_are_refused() -> None:
    td = micro_batch()
    with pytest.raises(ValueError, match="computed no entropy"):
        actor_objective(td["log_probs"], None, td, policy_loss="gpg", aggregation="token-mean", entropy_coef=0.1)
    with pytest.raises(ValueError, match="'trpo'; known are"):
        policy_loss_knobs("trpo")
    assert policy_loss_knobs("decoupled_ppo") == (
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_dual",
        "behaviour_cap",
    )


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_without_old_log_probs_the_policy_stands_for_itself(policy_loss: str) -> None:
    td = micro_batch()
    knobs = {name: 0.2 for name in policy_loss_knobs(policy_loss) if name != "clip_ratio_dual"}
    results = []
    for is_given in (True, False):
        log_probs = td["log_probs"].clone().requires_grad_()
        columns = {name: column for name, column in td.items() if name != "old_log_probs"}
        if is_given:
            columns["old_log_probs"] = td["log_probs"]
        loss, metrics = actor_objective(
            log_probs, None, columns, policy_loss=policy_loss, aggregation="token-mean", kl_coef=0.1, **knobs
        )
        loss.backward()
        results.append((loss.detach(), log_probs.grad[td["response_mask"]], metrics))
    (given, given_gradient, _), (own, own_gradient, metrics) = results
    assert torch.equal(given, own)
    assert torch.equal(given_gradient, own_gradient)
    assert metrics["actor/log_ratio/max"] == 0.0
    # Four of five rows have a token: KL summed over tokens, mean over these rows.
    assert metrics["actor/reference_kl/count"] == 4
