import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks.algorithms.advantages import broadcast_to_tokens, discounted_returns, gae, remax_advantages
from tasks.algorithms.masking import whiten

NAN = math.nan


def bools(*rows: list[int]) -> Tensor:
    return tensor(rows, dtype=torch.bool)


def close(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(got, tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", [9.0, 0.0, -1e30, NAN, math.inf])
def test_gae_ignores_values_after_the_response(padding: float) -> None:
    rewards, mask = tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]), bools([1, 1, 1, 0, 0])
    values = tensor([[0.5, 0.4, 0.3, padding, padding]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    close(advantages, [[0.43675, 0.565, 0.7, 0.0, 0.0]])
    close(returns, [[0.93675, 0.965, 1.0, 0.0, 0.0]])
    zero = gae(rewards, values.nan_to_num(0.0, 0.0, 0.0).where(mask, 0.0), mask, gamma=1.0, gae_lambda=0.95)
    assert torch.equal(zero[0], advantages), "bit-identical whatever stands in the padding"


def test_the_naive_recursion_would_read_the_padding() -> None:
    rewards, values, advantage, naive = [0, 0, 1, 0, 0], [0.5, 0.4, 0.3, 9, 9, 0], 0.0, [0.0] * 5
    for t in reversed(range(5)):
        advantage = rewards[t] + values[t + 1] - values[t] + 0.95 * advantage
        naive[t] = advantage
    assert naive[:3] == pytest.approx([1.228694, 1.398625, 1.5775], abs=1e-5)


def test_gae_steps_over_tool_tokens_without_decay_and_without_their_values() -> None:
    rewards, values = tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]), tensor([[0.2, 0.3, 7.0, 7.0, 0.4]])
    advantages, returns = gae(rewards, values, bools([1, 1, 0, 0, 1]), gamma=0.9, gae_lambda=0.8)
    close(advantages, [[0.42424, 0.492, 0.0, 0.0, 0.6]])
    assert returns[0, 2:4].tolist() == [0.0, 0.0]
    walked, _ = gae(rewards, values, bools([1, 1, 1, 1, 1]), gamma=0.9, gae_lambda=0.8)
    assert walked[0, 0] != pytest.approx(0.42424, abs=0.1)


def test_gae_with_tool_tokens_equals_gae_on_the_compressed_row() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(1, 9, generator=generator), torch.randn(1, 9, generator=generator)
    mask = bools([0, 1, 1, 0, 0, 1, 0, 1, 0])
    advantages, _ = gae(rewards, values, mask, gamma=0.97, gae_lambda=0.9)
    compressed, _ = gae(
        rewards[mask][None], values[mask][None], torch.ones(1, 4, dtype=torch.bool), gamma=0.97, gae_lambda=0.9
    )
    assert torch.equal(advantages[mask], compressed[0])


def test_a_cut_response_is_bootstrapped_from_its_own_last_state_and_never_from_its_neighbour() -> None:
    rewards, values, mask = tensor([[0.0], [0.0]]), tensor([[1.0], [100.0]]), bools([1], [1])
    bootstrapped, _ = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0, bootstrap_values=tensor([1.0, 0.0]))
    terminal, _ = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    assert bootstrapped[0, 0] == 0.0
    assert terminal[0, 0] == -1.0


def test_gae_of_a_row_without_tokens_is_zero_even_when_bootstrapped() -> None:
    advantages, returns = gae(
        tensor([[1.0, 1.0]]),
        tensor([[NAN, NAN]]),
        bools([0, 0]),
        gamma=1.0,
        gae_lambda=1.0,
        bootstrap_values=tensor([3.0]),
    )
    assert not advantages.any()
    assert not returns.any()


rows = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=12
)


@settings(deadline=None)
@given(rows, st.sampled_from([1.0, 0.9, 0.0]))
def test_gae_with_lambda_one_is_returns_minus_values(row: list[tuple[float, float, bool]], gamma: float) -> None:
    rewards, values, mask = (tensor([column]) for column in zip(*row, strict=True))
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    to_go = discounted_returns(rewards, mask, gamma=gamma)
    torch.testing.assert_close(returns, to_go, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(advantages, (to_go - values).where(mask, 0.0), atol=1e-4, rtol=1e-5)


@settings(deadline=None)
@given(rows)
def test_gae_with_lambda_zero_is_the_one_step_error(row: list[tuple[float, float, bool]]) -> None:
    rewards, values, mask = (tensor([column]) for column in zip(*row, strict=True))
    advantages, _ = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.0)
    known = values[mask].tolist()
    expected = [r + nxt - v for r, v, nxt in zip(rewards[mask].tolist(), known, [*known, 0.0][1:], strict=True)]
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-4)


def test_returns_flow_across_an_interior_tool_token_with_one_discount_per_sampled_token() -> None:
    returns = discounted_returns(tensor([[0.0, 0.0, 1.0]]), bools([1, 0, 1]), gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0]], "a reset at the masked token would give 0 at index 0"


def test_expanding_a_row_with_tool_tokens_changes_no_advantage() -> None:
    expanded_mask = bools([1, 1, 0, 0, 1, 1])
    compact = discounted_returns(tensor([[0.0, 0.0, 0.0, 1.0]]), bools([1, 1, 1, 1]), gamma=1.0)
    expanded = discounted_returns(tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]), expanded_mask, gamma=1.0)
    assert compact.tolist() == [[1.0] * 4]
    assert expanded[expanded_mask].tolist() == [1.0] * 4
    assert torch.equal(whiten(expanded, expanded_mask)[expanded_mask], whiten(compact, bools([1] * 4))[0])


def test_remax_subtracts_the_greedy_score_from_the_reward_to_go() -> None:
    advantages = remax_advantages(tensor([[NAN, -0.1, 1.0, 5.0]]), tensor([0.4]), bools([0, 1, 1, 0]))
    close(advantages, [[0.0, 0.5, 0.6, 0.0]])


def test_an_advantage_of_a_response_lies_on_its_sampled_tokens_only() -> None:
    assert broadcast_to_tokens(tensor([2.0, NAN]), bools([0, 1, 1], [0, 0, 0])).tolist() == [[0, 2, 2], [0, 0, 0]]


def test_columns_of_another_width_are_refused_under_test() -> None:
    with pytest.raises(Exception, match="Type-check error"):
        gae(torch.zeros(1, 3), torch.zeros(1, 4), torch.ones(1, 3, dtype=torch.bool), gamma=1.0, gae_lambda=1.0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_or_no_tokens_give_no_advantages(shape: tuple[int, int]) -> None:
    nothing, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert gae(nothing, nothing, mask, gamma=1.0, gae_lambda=1.0)[0].shape == shape
    assert discounted_returns(nothing, mask, gamma=1.0).shape == shape
