"""Log-probs by hand, and chunked equal to whole."""

import math

import pytest
import torch

from resources.models.log_probs import (
    HeadShape,
    chunked_log_probs,
    log_probs_from_logits,
    scatter_to_mask,
    shift_to_targets,
)


def head_of_logits(logits):
    """Hidden states and a head whose product is exactly `logits`."""
    return logits, torch.eye(logits.shape[-1])


def test_the_log_prob_of_a_token_comes_from_the_state_before_it():
    """ids [0, 2, 1]; the states of positions 0 and 1 score tokens 2 and 1. Without the shift: -1.551445, -3.094923."""
    ids = torch.tensor([[0, 2, 1]])
    states = torch.tensor([[[2.0, 0, 0], [0, 1.0, 0], [0, 0, 3.0]]])
    mask = torch.tensor([[False, True, True]])
    hidden, weight = head_of_logits(shift_to_targets(states)[mask])
    log_probs, _ = chunked_log_probs(hidden, weight, ids[mask])
    torch.testing.assert_close(log_probs, torch.tensor([-2.239545, -0.551445]), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        scatter_to_mask(log_probs, mask), torch.tensor([[0.0, -2.239545, -0.551445]]), atol=1e-6, rtol=0
    )


def test_the_temperature_divides_the_logits():
    """logits [2, 1, 0], token 0, T = 0.5: -0.142932; scaling the log-prob instead would give -0.815212."""
    hidden, weight = head_of_logits(torch.tensor([[2.0, 1.0, 0.0]]))
    log_probs, _ = chunked_log_probs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert float(log_probs) == pytest.approx(-0.142932, abs=1e-6)


def test_logits_become_float32_before_the_log_softmax():
    """The bfloat16 rounding of [20.3, 20.1, 5, -3] is unavoidable; a log-softmax in bfloat16 on top of it is not."""
    logits = torch.tensor([[20.3, 20.1, 5.0, -3.0]])
    targets = torch.tensor([0])
    full, _ = log_probs_from_logits(logits, targets)
    assert float(full) == pytest.approx(-0.5981395, abs=1e-6)
    rounded = logits.bfloat16()
    hidden, weight = head_of_logits(rounded)
    log_probs, _ = chunked_log_probs(hidden, weight.bfloat16(), targets)
    assert log_probs.dtype == torch.float32
    assert float(log_probs) == pytest.approx(float(log_probs_from_logits(rounded.float(), targets)[0]), abs=1e-6)


def test_a_log_prob_is_never_above_zero():
    hidden, weight = head_of_logits(torch.tensor([[80.0, 0.0, 0.0]]))
    assert float(chunked_log_probs(hidden, weight, torch.tensor([0]))[0]) <= 0.0


def test_the_entropy_of_even_odds_is_the_log_of_their_number():
    _, entropy = chunked_log_probs(torch.zeros(2, 3), torch.ones(8, 3), torch.tensor([0, 1]), with_entropy=True)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(8.0)))


def whole(hidden, weight, bias, targets, temperature, shape):
    logits = (hidden @ weight.T + bias) * shape.logit_scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return log_probs_from_logits(logits, targets, temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 100])
@pytest.mark.parametrize("shape", [HeadShape(), HeadShape(logit_scale=0.3, softcap=5.0)], ids=["plain", "capped"])
def test_chunked_equals_whole_in_values_and_gradients(temperature, chunk_tokens, shape):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator).requires_grad_() for size in ((37, 16), (50, 16), (50,))
    )
    targets = torch.randint(0, 50, (37,), generator=generator)
    on_log_probs, on_entropy = torch.randn(37, generator=generator), torch.randn(37, generator=generator)

    expected = whole(hidden, weight, bias, targets, temperature, shape)
    chunked = chunked_log_probs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
        bias=bias,
        shape=shape,
    )
    gradients = [
        torch.autograd.grad((log_probs * on_log_probs).sum() + (entropy * on_entropy).sum(), (hidden, weight, bias))
        for log_probs, entropy in (expected, chunked)
    ]
    for left, right in zip(chunked, expected, strict=True):
        torch.testing.assert_close(left, right, atol=5e-6, rtol=1e-5)
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_second_backward_pass_finds_the_gradients_of_the_first(with_entropy):
    """The first one works in the memory of logits that the forward pass has left."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    log_probs, entropy = chunked_log_probs(
        hidden, weight, torch.tensor([0, 6, 2, 2, 5]), chunk_tokens=3, with_entropy=with_entropy
    )
    loss = log_probs.sum() if entropy is None else (log_probs * 0.5 + entropy).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(first, second, strict=True))


def test_no_wanted_token_gives_no_log_probs_and_zero_gradients():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    log_probs, _ = chunked_log_probs(hidden, weight, torch.empty(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros(6, 4))


def test_the_shift_leaves_nothing_at_the_first_position():
    assert shift_to_targets(torch.tensor([[7.0], [8.0]])).tolist() == [[0.0], [0.0]]
