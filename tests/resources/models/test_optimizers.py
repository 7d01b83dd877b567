"""AdamW, clipping and schedules by hand; a gradient that is not finite changes nothing."""

import math

import pytest
import torch
from torch import nn

from configs.model import OptimizerConfig
from resources.models.optimizers import RoleOptimizer, learning_rate


def optimizer_of(*values, **config):
    parameter = nn.Parameter(torch.tensor(values))
    return RoleOptimizer([("w", parameter)], OptimizerConfig(**{"lr": 0.1, **config})), parameter


def test_two_steps_of_adam_by_hand():
    """w = 1, gradients 1 then 0.1: 0.9, then 0.8259189."""
    optimizer, w = optimizer_of(1.0)
    for gradient, expected in ((1.0, 0.9), (0.1, 0.8259189)):
        w.grad = torch.tensor([gradient])
        optimizer.step()
        assert float(w.detach()) == pytest.approx(expected, abs=1e-6)


def test_restored_moments_continue_where_lost_ones_would_jump():
    """After the first step the state goes to a new optimizer: 0.8259189; with moments at zero it would be 0.8."""
    first, w = optimizer_of(1.0)
    w.grad = torch.tensor([1.0])
    first.step()
    second, restored = optimizer_of(float(w.detach()))
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    second.load_scalars(first.scalars())
    restored.grad = torch.tensor([0.1])
    second.step()
    assert float(restored.detach()) == pytest.approx(0.8259189, abs=1e-6)


def test_the_fused_update_is_that_of_torch():
    optimizer, w = optimizer_of(1.0, -2.0, 3.0, max_grad_norm=100.0)
    twin = nn.Parameter(w.detach().clone())
    reference = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    for step in range(5):
        gradient = torch.tensor([0.3, -0.2, 0.1]) * (step + 1)
        w.grad, twin.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(w, twin)


def test_weight_decay_acts_on_matrices_and_not_on_norms():
    matrix, norm = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    optimizer = RoleOptimizer([("matrix", matrix), ("norm", norm)], OptimizerConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros(1, 1), torch.zeros(1)
    optimizer.step()
    assert float(matrix.detach()) == pytest.approx(0.95)
    assert float(norm.detach()) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad):
    optimizer, w = optimizer_of(1.0, 2.0, max_grad_norm=1.0)
    w.grad = torch.tensor([bad, 4.0])
    outcome = optimizer.step()
    assert outcome.was_skipped
    assert w.tolist() == [1.0, 2.0]
    assert (optimizer.steps, optimizer.skipped_steps) == (0, 1)
    assert all(float(moment.abs().sum()) == 0.0 for moment in optimizer.tensors().values())


def test_the_gradient_is_clipped_to_the_global_norm():
    """[3, 4] has norm 5; clipped to 1 it is [0.6, 0.8], which the first moment shows times 1 - beta1."""
    optimizer, w = optimizer_of(0.0, 0.0, max_grad_norm=1.0)
    w.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step().grad_norm == pytest.approx(5.0)
    torch.testing.assert_close(optimizer.tensors()["optimizer.exp_avg.w"], torch.tensor([0.06, 0.08]))


@pytest.mark.parametrize("norm", [-1.0, 0.0, math.inf, math.nan])
def test_a_clip_norm_that_would_flip_or_freeze_is_refused(norm):
    with pytest.raises(ValueError, match="max_grad_norm"):
        OptimizerConfig(max_grad_norm=norm)


def test_warm_up_then_cosine():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="cosine", total_steps=4)
    assert [learning_rate(config, step) for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_an_optimizer_over_nothing_is_refused():
    with pytest.raises(ValueError, match="no parameter is trainable"):
        RoleOptimizer([("w", nn.Parameter(torch.ones(1), requires_grad=False))], OptimizerConfig())
