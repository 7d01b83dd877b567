"""Every row in exactly one micro-batch, within the budget, balanced over ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.micro_batches import balance_over_ranks, fill_fraction, split_by_count, split_by_tokens

lengths = st.lists(st.integers(min_value=0, max_value=50), max_size=40)


@given(lengths, st.integers(min_value=1, max_value=9))
def test_split_by_count_keeps_every_row_once(row_lengths, size):
    batches = split_by_count(row_lengths, size)
    assert sorted(row for batch in batches for row in batch) == list(range(len(row_lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)


@given(lengths, st.integers(min_value=1, max_value=80))
def test_split_by_tokens_keeps_every_row_once_and_padding_inside_the_budget(row_lengths, budget):
    batches = split_by_tokens(row_lengths, budget)
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


def test_similar_lengths_share_a_micro_batch():
    assert split_by_count([9, 1, 8, 2], 2) == [[0, 2], [3, 1]]
    assert fill_fraction([9, 1, 8, 2], [[0, 2], [3, 1]]) == 20 / 22


@pytest.mark.parametrize(
    "call", [lambda: split_by_count([1], 0), lambda: split_by_tokens([1], 0), lambda: balance_over_ranks([1], 0)]
)
def test_sizes_below_one_are_refused(call):
    with pytest.raises(ValueError, match="at least 1"):
        call()
