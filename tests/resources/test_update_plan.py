"""Every trained row once an epoch, the same number of passes on every rank, counts that are global."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.update_plan import make_update_plans


def flat(plan, epoch):
    return [row for mini in plan.mini_batches if mini.epoch == epoch for micro in mini.micro_batches for row in micro]


@settings(max_examples=60, deadline=None)
@given(
    trained=st.lists(st.integers(min_value=0, max_value=9), max_size=24),
    dp_size=st.integers(min_value=1, max_value=4),
    num_mini_batches=st.integers(min_value=1, max_value=4),
    budget=st.none() | st.integers(min_value=4, max_value=40),
)
def test_every_trained_row_once_an_epoch_and_equal_passes_on_all_ranks(trained, dp_size, num_mini_batches, budget):
    rows = list(range(50, 50 + len(trained)))
    plans = make_update_plans(
        rows, [count + 2 for count in trained], trained, dp_size=dp_size, num_mini_batches=num_mini_batches,
        num_ppo_epochs=2, micro_batch_size=3, micro_batch_tokens=budget,
    )  # fmt: skip
    wanted = sorted(row for row, count in zip(rows, trained, strict=True) if count)
    for epoch in (0, 1):
        assert sorted(row for plan in plans for row in flat(plan, epoch)) == wanted
    for minis in zip(*(plan.mini_batches for plan in plans), strict=True):
        assert len({len(mini.micro_batches) for mini in minis}) == 1
        assert len({(mini.num_response_tokens, mini.num_sequences) for mini in minis}) == 1
        held = [row for mini in minis for micro in mini.micro_batches for row in micro]
        assert minis[0].num_sequences == len(held) > 0
        assert minis[0].num_response_tokens == sum(trained[row - 50] for row in held)
    assert all(plan.num_masked_rows == trained.count(0) for plan in plans)


def test_three_rows_on_two_ranks_take_two_passes_on_both():
    """A rank that stopped after one pass would leave the other in a collective for ever."""
    plans = make_update_plans([1, 2, 3], [2, 2, 2], [1, 1, 1], dp_size=2, micro_batch_size=1)
    assert [len(plan.mini_batches[0].micro_batches) for plan in plans] == [2, 2]
    assert sum(micro == () for plan in plans for micro in plan.mini_batches[0].micro_batches) == 1


def test_fifty_rows_on_six_ranks_in_mini_batches_of_eight_need_no_padding():
    plans = make_update_plans(list(range(50)), [5] * 50, [3] * 50, dp_size=6, num_mini_batches=7, micro_batch_size=8)
    assert [mini.num_sequences for mini in plans[0].mini_batches] == [7, 7, 7, 7, 7, 7, 8]
    assert sorted(row for plan in plans for row in flat(plan, 0)) == list(range(50))


def test_the_mini_batches_do_not_depend_on_the_number_of_ranks():
    def rows_of(dp_size):
        plans = make_update_plans(
            list(range(9)), [4] * 9, [2] * 9, dp_size=dp_size, num_mini_batches=3, seed=5, iteration=2
        )
        return [
            sorted(row for plan in plans for micro in plan.mini_batches[step].micro_batches for row in micro)
            for step in range(3)
        ]

    assert rows_of(1) == rows_of(2) == rows_of(4)


def test_the_order_depends_on_seed_iteration_and_epoch():
    def order(seed, iteration):
        plan = make_update_plans(
            list(range(32)), [4] * 32, [2] * 32, num_mini_batches=4, num_ppo_epochs=2, seed=seed, iteration=iteration
        )[0]
        return [sorted(row for micro in mini.micro_batches for row in micro) for mini in plan.mini_batches]

    first = order(0, 0)
    assert first == order(0, 0)
    assert first[:4] != first[4:]
    assert first != order(1, 0)
    assert first != order(0, 1)


def test_a_batch_without_a_trained_token_has_no_steps():
    plan = make_update_plans([1, 2], [3, 3], [0, 0])[0]
    assert plan.mini_batches == ()
    assert plan.num_masked_rows == 2


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 row ids, 1 lengths"):
        make_update_plans([1, 2], [3], [1, 1])
