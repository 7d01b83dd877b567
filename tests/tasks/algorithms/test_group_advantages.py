import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tasks.algorithms.group_advantages import (
    group_policy_gradient,
    group_relative,
    groups_with_signal,
    leave_one_out,
    optimal_baseline,
    pass_at_k_advantages,
    rows_with_signal,
)

NAN = math.nan


def grpo(scores: Tensor, groups: Tensor, rollouts: Tensor | None = None) -> Tensor:
    return group_relative(scores, groups, scale_by_std=True, rollout_ids=rollouts, eps=0.0)


def centred(scores: Tensor, groups: Tensor, rollouts: Tensor | None = None) -> Tensor:
    return group_relative(scores, groups, scale_by_std=False, rollout_ids=rollouts)


def opo(scores: Tensor, groups: Tensor) -> Tensor:
    return optimal_baseline(scores, groups, torch.arange(1, len(scores) + 1))


def pass_at_2(scores: Tensor, groups: Tensor) -> Tensor:
    return pass_at_k_advantages(scores, groups, k=2)


def with_eps(scores: Tensor, groups: Tensor) -> Tensor:
    return group_relative(scores, groups, scale_by_std=True)


ESTIMATORS = [with_eps, centred, leave_one_out, opo, group_policy_gradient, pass_at_2]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def same_group(*scores: float) -> tuple[Tensor, Tensor]:
    return tensor(scores), torch.zeros(len(scores), dtype=torch.long)


def test_grpo_dr_grpo_and_rloo_by_hand() -> None:
    scores, groups = same_group(1, 1, 1, 0, 0, 0, 0, 0)
    scores = scores.float()
    grpo_expected = [1.207612] * 3 + [-0.7245674] * 5
    assert with_eps(scores, groups).tolist() == pytest.approx(grpo_expected, abs=1e-5)
    assert centred(scores, groups).tolist() == pytest.approx([0.625] * 3 + [-0.375] * 5, abs=1e-6)
    assert leave_one_out(scores, groups).tolist() == pytest.approx([0.7142857] * 3 + [-0.4285714] * 5, abs=1e-6)


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    got = grpo(*same_group(1.0, 0.0, 1.0, 0.0)).tolist()
    assert got == pytest.approx([0.8660254, -0.8660254, 0.8660254, -0.8660254], abs=1e-6)
    assert got[0] != pytest.approx(1.0, abs=1e-3), "the population's standard deviation would give 1"


@every_estimator
def test_a_lone_response_has_advantage_zero_beside_a_full_group(estimator) -> None:
    got = estimator(tensor([2.0, 1.0, 0.0, 0.0]), tensor([7, 3, 3, 3]))
    assert got[0] == 0.0
    assert got[1] > 0 > got[2]
    assert estimator(tensor([2.0]), tensor([0])).tolist() == [0.0]


def test_ragged_groups_by_hand() -> None:
    scores, groups = tensor([2.0, 1.0, 0.0]), tensor([7, 3, 3])
    assert grpo(scores, groups).tolist() == pytest.approx([0.0, 0.7071068, -0.7071068], abs=1e-6)
    assert leave_one_out(scores, groups).tolist() == [0.0, 1.0, -1.0]


def test_an_unscorable_row_is_no_vote_and_has_advantage_zero() -> None:
    scores, groups = same_group(1.0, NAN, 0.0, NAN)
    assert grpo(scores, groups).tolist() == pytest.approx([0.7071068, 0, -0.7071068, 0], abs=1e-6)
    got = leave_one_out(scores, groups).tolist()
    assert got == [1.0, 0.0, -1.0, 0.0]
    assert got != leave_one_out(scores.nan_to_num(0.0), groups).tolist(), "taking it as 0 would give -1/3"


@every_estimator
def test_one_scorable_row_left_gives_zeros_and_no_nan(estimator) -> None:
    assert estimator(*same_group(NAN, NAN, NAN, 1.0)).tolist() == [0.0] * 4
    assert estimator(*same_group(NAN, NAN)).tolist() == [0.0] * 2


def test_groups_come_from_ids_and_not_from_positions() -> None:
    got = centred(tensor([1.0, 10.0, 3.0, 14.0]), tensor([1, 2, 1, 2])).tolist()
    assert got == [-1.0, -2.0, 1.0, 2.0]
    assert got != [-4.5, 4.5, -5.5, 5.5], "adjacent rows taken for siblings"


def test_a_rollout_of_three_segments_has_one_vote() -> None:
    scores, groups = same_group(1.0, 0.0, 0.0, 0.0)
    rollouts = tensor([10, 11, 11, 11])
    assert centred(scores, groups, rollouts).tolist() == pytest.approx([0.5, -0.5, -0.5, -0.5], abs=1e-6)
    assert centred(scores, groups)[0] == 0.75, "one vote a row would put the mean at 0.25"
    expected = leave_one_out(*same_group(1.0, 0.0))[[0, 1, 1, 1]]
    torch.testing.assert_close(leave_one_out(scores, groups, rollout_ids=rollouts), expected)
    torch.testing.assert_close(grpo(scores, groups, rollouts), grpo(*same_group(1.0, 0.0))[[0, 1, 1, 1]])


@every_estimator
@pytest.mark.parametrize("score", [0.1, 1.0, -3.3, 1e6])
def test_equal_scores_give_exactly_zero(estimator, score: float) -> None:
    assert estimator(*same_group(score, score, score)).tolist() == [0.0, 0.0, 0.0]


scored = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, NAN]), st.integers(0, 3)), min_size=1, max_size=16)


@every_estimator
@settings(deadline=None, max_examples=40)
@given(pairs=scored, random=st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(estimator, pairs, random) -> None:
    if estimator is opo:
        return  # its test lengths go by position
    order = list(range(len(pairs)))
    random.shuffle(order)
    scores, groups = tensor([s for s, _ in pairs]), tensor([g for _, g in pairs])
    straight, shuffled = estimator(scores, groups), estimator(scores[order], groups[order])
    torch.testing.assert_close(shuffled, straight[order], atol=1e-6, rtol=0)
    assert straight.isfinite().all()
    assert not straight[scores.isnan()].any()


@pytest.mark.parametrize("estimator", [with_eps, centred, leave_one_out, group_policy_gradient, pass_at_2])
@settings(deadline=None, max_examples=40)
@given(pairs=scored)
def test_the_advantages_of_a_group_sum_to_zero(estimator, pairs) -> None:
    scores, groups = tensor([s for s, _ in pairs]), tensor([g for _, g in pairs])
    advantages = estimator(scores, groups)
    for group in range(4):
        assert float(advantages[groups == group].sum()) == pytest.approx(0.0, abs=1e-4)


def test_opo_weighs_the_baseline_by_length() -> None:
    scores, groups = same_group(1.0, 0.0, NAN)
    got = optimal_baseline(scores, groups, tensor([1, 3, 50]))
    assert got.tolist() == pytest.approx([0.75, -0.25, 0.0], abs=1e-6)


def test_gpg_scales_up_for_the_rows_without_signal() -> None:
    scores, groups = tensor([1.0, 0.0, 1.0, 1.0, NAN]), tensor([0, 0, 1, 1, 1])
    got = group_policy_gradient(scores, groups).tolist()
    assert got == [1.0, -1.0, 0.0, 0.0, 0.0], "alpha = 4 / (4 - 2) times +-0.5"
    assert group_policy_gradient(*same_group(0.0, 0.0)).tolist() == [0.0, 0.0]


def test_pass_at_k_equals_the_average_over_all_subsets() -> None:
    scores, k = [1.0, 1.0, 0.0, 0.0, 0.0], 3
    subsets = list(itertools.combinations(range(5), k))
    wins = [max(scores[i] for i in subset) for subset in subsets]
    mean = sum(wins) / len(wins)
    std = (mean * (1 - mean)) ** 0.5
    expected = []
    for i in range(5):
        mine = [(win - mean) / std for subset, win in zip(subsets, wins, strict=True) if i in subset]
        expected.append(sum(mine) / len(mine))
    got = pass_at_k_advantages(*same_group(*scores), k=k)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_pass_at_one_is_grpo_with_the_population_deviation() -> None:
    assert pass_at_k_advantages(*same_group(1.0, 0.0, 0.0, 0.0), k=1).tolist() == pytest.approx(
        [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], abs=1e-6
    )


def test_pass_at_k_has_no_signal_when_k_subsets_always_or_never_win_or_do_not_exist() -> None:
    for scores, k in (((1.0, 1.0, 0.0), 2), ((0.0, 0.0, 0.0), 2), ((1.0, 0.0, NAN), 3)):
        assert pass_at_k_advantages(*same_group(*scores), k=k).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="pass_k is 0"):
        pass_at_k_advantages(*same_group(1.0, 0.0), k=0)


def test_pass_at_k_stays_finite_where_binomials_overflow() -> None:
    scores = torch.cat([torch.ones(3), torch.zeros(4997)])
    assert pass_at_k_advantages(scores, torch.zeros(5000, dtype=torch.long), k=200).isfinite().all()


def test_only_groups_whose_scorable_scores_differ_have_signal() -> None:
    scores = tensor([1.0, 0.0, 1.0, 1.0, NAN, 0.0, 0.0])
    groups = tensor([5, 5, 2, 2, 5, 9, 2])
    assert groups_with_signal(scores, groups).tolist() == [True, True, False]
    assert rows_with_signal(scores, groups).tolist() == [True, True, True, True, True, False, True]
    assert rows_with_signal(*same_group(NAN, 1.0)).tolist() == [False, False]


def test_a_rollout_of_three_segments_has_one_vote_in_pass_at_k_and_gpg_too() -> None:
    scores, groups = same_group(1.0, 0.0, 0.0, 0.0)
    rollouts = tensor([10, 11, 11, 11])
    two = pass_at_k_advantages(*same_group(1.0, 0.0), k=1)
    assert two.tolist() == [1.0, -1.0]
    assert pass_at_k_advantages(scores, groups, k=1, rollout_ids=rollouts).tolist() == [1.0, -1.0, -1.0, -1.0]
    assert pass_at_k_advantages(scores, groups, k=1)[0] == pytest.approx(3**0.5), "one vote a row"
    scores, groups = tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), tensor([0, 0, 1, 1, 1, 1])
    got = group_policy_gradient(scores, groups, rollout_ids=tensor([1, 2, 3, 3, 3, 4]))
    assert got.tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0], "alpha = 4 rollouts / 2 with signal, not 6 rows / 2"


def test_opo_counts_the_tokens_of_all_segments_of_a_rollout() -> None:
    scores, groups = same_group(1.0, 0.0, 0.0)
    whole = optimal_baseline(*same_group(1.0, 0.0), tensor([2, 6]))
    split = optimal_baseline(scores, groups, tensor([2, 1, 5]), rollout_ids=tensor([7, 8, 8]))
    assert whole.tolist() == [0.75, -0.25]
    assert split.tolist() == [0.75, -0.25, -0.25]


@every_estimator
def test_no_rows_give_no_advantages(estimator) -> None:
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_bfloat16_scores_are_compared_in_full_precision() -> None:
    scores, groups = same_group(256.0, 258.0)  # a mean of 257 has no bfloat16
    assert centred(scores.bfloat16(), groups).tolist() == [-1.0, 1.0]
