"""Every row in exactly one micro-batch, within the budget, balanced over ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.micro_batches import (
    Siblings,
    balance_over_ranks,
    split_rows,
)

lengths = st.lists(st.integers(min_value=0, max_value=50), max_size=40)


@given(lengths, st.integers(min_value=1, max_value=9))
def test_micro_batches_of_rows_keep_every_row_once(row_lengths, size):
    batches = split_rows(row_lengths, size, None)
    assert sorted(row for batch in batches for row in batch) == list(range(len(row_lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)


@given(lengths, st.integers(min_value=1, max_value=80))
def test_micro_batches_of_tokens_keep_every_row_once_and_padding_inside_the_budget(row_lengths, budget):
    batches = split_rows(row_lengths, 1, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(row_lengths)))
    for batch in batches:
        padded = len(batch) * max(row_lengths[row] for row in batch)
        assert padded <= budget or len(batch) == 1


@settings(max_examples=50)
@given(lengths, st.integers(min_value=1, max_value=5))
def test_balancing_keeps_every_row_once_and_loads_close(row_lengths, ranks):
    shares = balance_over_ranks(row_lengths, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(row_lengths)))
    loads = [sum(row_lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(row_lengths, default=0)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(0, 5)), max_size=30),
    st.integers(min_value=1, max_value=9),
    st.none() | st.integers(min_value=1, max_value=80),
)
def test_rows_with_siblings_are_kept_once_each_and_inside_the_budget(rows, size, budget):
    row_lengths = [prompt + response for prompt, response, _ in rows]
    siblings = Siblings(groups=[group for *_, group in rows], prompts=[prompt for prompt, *_ in rows])
    batches = split_rows(row_lengths, size, budget, siblings)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        padded = len(batch) * max(row_lengths[row] for row in batch)
        assert len(batch) <= size if budget is None else padded <= budget or len(batch) == 1


def test_siblings_stand_together_where_their_prompt_is_worth_it():
    """Prompts of 20 tokens, responses of 2 and 3: a pass of both siblings reads 25 tokens, of two strangers 45."""
    long = Siblings(groups=[0, 1, 0, 1], prompts=[20] * 4)
    assert split_rows([23, 23, 22, 22], 2, None, long) == [[0, 2], [1, 3]]
    assert split_rows([23, 23, 22, 22], 2, None) == [[0, 1], [2, 3]]


def test_similar_lengths_share_a_micro_batch():
    assert split_rows([9, 1, 8, 2], 2, None) == [[0, 2], [3, 1]]


@pytest.mark.parametrize(
    "call", [lambda: split_rows([1], 0, None), lambda: split_rows([1], 1, 0), lambda: balance_over_ranks([1], 0)]
)
def test_sizes_below_one_are_refused(call):
    with pytest.raises(ValueError, match="at least 1"):
        call()
