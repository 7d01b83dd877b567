import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks.algorithms.distillation import (
    forward_kl_top_k,
    reverse_kl_losses,
    teacher_advantages,
)

NAN = math.nan


def top_k(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids = teacher.topk(k).indices
    return student.gather(-1, ids)[None, None], teacher.gather(-1, ids)[None, None]


def test_a_token_is_paid_what_the_teacher_finds_it_likelier() -> None:
    mask = tensor([[True, True, False]])
    got = teacher_advantages(tensor([[-2.0, -1.0, NAN]]), tensor([[-0.5, -4.0, NAN]]), mask)
    assert got.tolist() == [[1.5, -3.0, 0.0]]


def test_the_reverse_kl_loss_pulls_towards_the_teacher() -> None:
    x = tensor([[-2.0, -1.0, NAN]], requires_grad=True)
    losses = reverse_kl_losses(x, tensor([[-0.5, -4.0, NAN]]), tensor([[True, True, False]]))
    losses.sum().backward()
    assert losses.tolist() == [pytest.approx([math.exp(1.5) - 2.5, math.exp(-3.0) + 2.0, 0.0], rel=1e-5)]
    assert x.grad is not None
    assert x.grad.tolist() == [[-1.5, 3.0, 0.0]], "the gradient of the KL: log student - log teacher"


def test_forward_kl_over_the_whole_vocabulary_is_the_exact_one() -> None:
    student, teacher = tensor([0.1, 0.5, -0.4]).log_softmax(-1), tensor([1.0, 0.0, -1.0]).log_softmax(-1)
    exact = (teacher.exp() * (teacher - student)).sum()
    got = forward_kl_top_k(*top_k(student, teacher, 3), torch.ones(1, 1, dtype=torch.bool))
    assert got.item() == pytest.approx(exact.item(), abs=1e-5)


def test_forward_kl_lumps_the_tail_into_one_cell() -> None:
    student, teacher = tensor([0.2, 0.3, 0.5]).log(), tensor([0.6, 0.3, 0.1]).log()
    got = forward_kl_top_k(*top_k(student, teacher, 1), torch.ones(1, 1, dtype=torch.bool))
    assert got.item() == pytest.approx(0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-8, 8), min_size=8, max_size=8), st.lists(st.floats(-8, 8), min_size=8, max_size=8))
def test_forward_kl_is_never_negative_never_above_the_exact_one_and_zero_for_a_perfect_student(a, b) -> None:
    student, teacher = tensor(a).double().log_softmax(-1), tensor(b).double().log_softmax(-1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    exact = (teacher.exp() * (teacher - student)).sum().item()
    for k in (1, 3):
        got = forward_kl_top_k(*top_k(student, teacher, k), mask).item()
        assert -1e-5 <= got <= exact + 1e-4
        assert forward_kl_top_k(*top_k(teacher, teacher, k), mask).item() == 0.0


def test_padding_of_nan_reaches_no_gradient_of_the_forward_kl() -> None:
    x = tensor([[[-0.5, -2.0], [NAN, NAN]]], requires_grad=True)
    teacher, mask = tensor([[[-0.2, -3.0], [NAN, NAN]]]), tensor([[True, False]])
    losses = forward_kl_top_k(x, teacher, mask)
    losses.sum().backward()
    assert losses[0, 1] == 0.0
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[0, 1].any()
