import itertools
import math
import random

import pytest

from tasks.algorithms.evaluation import (
    best_at_n,
    bootstrap_interval,
    majority_at_n,
    pass_at_k,
    summarise_samples,
)

NAN = math.nan


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 4, 2), (4, 0, 4), (4, 4, 1), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_sample(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_does_not_fit(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples with {c} correct"):
        pass_at_k(n, c, k)


def test_best_at_n_is_the_mean_over_all_subsets_and_pass_at_k_for_zero_one_scores() -> None:
    scores = [0.3, -1.0, 2.0, 0.3, 0.9]
    for n in range(1, 6):
        subsets = list(itertools.combinations(scores, n))
        assert best_at_n(scores, n) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    assert best_at_n([1.0, 0.0, 0.0, 1.0], 2) == pytest.approx(pass_at_k(4, 2, 2))
    with pytest.raises(ValueError, match="best@3 of 2 samples"):
        best_at_n([1.0, 0.0], 3)


def test_majority_does_not_depend_on_the_order_of_tied_answers() -> None:
    assert majority_at_n(["4", "5", "4"], [1.0, 0.0, 1.0]) == 1.0
    assert majority_at_n(["4", "5"], [1.0, 0.0]) == majority_at_n(["5", "4"], [0.0, 1.0]) == 0.5
    with pytest.raises(ValueError, match="majority of 1 answers with 2 scores"):
        majority_at_n(["4"], [1.0, 0.0])


def test_an_interval_is_reproducible_and_holds_the_mean() -> None:
    source = random.Random(0)
    values = [source.random() for _ in range(50)]
    low, high = bootstrap_interval(values, seed=4)
    assert low < sum(values) / 50 < high
    assert (low, high) == bootstrap_interval(values, seed=4)
    assert bootstrap_interval([0.7]) == (pytest.approx(0.7), pytest.approx(0.7))
    with pytest.raises(ValueError, match="bootstrap of 0 values"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match=r"confidence 1\.5"):
        bootstrap_interval([1.0], confidence=1.5)


def test_intervals_cover_the_exact_accuracy_of_a_known_policy() -> None:
    """A policy right with chance 0.3 on each of 60 prompts; 200 evaluations with fixed seeds."""
    source, covered = random.Random(1), 0
    for seed in range(200):
        values = [float(source.random() < 0.3) for _ in range(60)]
        low, high = bootstrap_interval(values, num_resamples=300, seed=seed)
        covered += low <= 0.3 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_summary_leaves_out_what_could_not_be_scored() -> None:
    summary = summarise_samples(
        [[1.0, 0.0, NAN], [NAN, NAN, NAN], [1.0, 1.0, 1.0]], [["a", "b", "b"], [""] * 3, ["c"] * 3]
    )
    assert summary["unscorable_prompts"] == 1.0
    assert summary["mean"] == 0.75
    assert summary["best"] == 1.0
    assert summary["majority"] == 0.75, "a and b tie once the unscorable b is out"
    assert summary["mean/low"] <= 0.75 <= summary["mean/high"]
    assert summarise_samples([[NAN]]) == {"unscorable_prompts": 1.0}


def test_a_score_that_is_nan_is_left_out_of_best_majority_and_interval_with_its_answer() -> None:
    assert best_at_n([NAN, 0.0, 1.0], 2) == 1.0
    assert best_at_n([0.0, NAN, 1.0], 1) == 0.5
    with pytest.raises(ValueError, match=r"best@3 of 3 samples, 2 of them scorable; n must lie"):
        best_at_n([NAN, 0.0, 1.0], 3)
    assert majority_at_n(["a", "b", "b"], [1.0, NAN, 0.0]) == 0.5, "a and b tie once the unscorable b is out"
    with pytest.raises(ValueError, match="majority of 2 answers, of which none has a score"):
        majority_at_n(["a", "b"], [NAN, NAN])
    assert bootstrap_interval([NAN, 0.7]) == (pytest.approx(0.7), pytest.approx(0.7))
    with pytest.raises(ValueError, match="bootstrap of 0 values"):
        bootstrap_interval([NAN])
