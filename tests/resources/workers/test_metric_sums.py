"""Means over micro-batches and ranks are those over all tokens."""

import math

import pytest
import torch

from resources.models.optimizers import StepOutcome
from resources.workers.metric_sums import MetricSums
from tasks.algorithms.diagnostics import finish_metrics, finite_mean_metric
from tests.resources.workers.tiny import logged


def test_a_mean_is_over_all_tokens_and_not_over_micro_batches():
    """Means 1, 1, 1, 5 over 8, 8, 8, 2 tokens and an empty slot: 34 / 26, where means of means give 2.0 or 1.6."""
    sums = MetricSums("actor", is_first=True)
    for mean, count in ((1.0, 8.0), (1.0, 8.0), (1.0, 8.0), (5.0, 2.0), (0.0, 0.0)):
        sums.add({"x": torch.tensor(mean * count), "x/count": torch.tensor(count)})
    assert logged([sums.numbers()]) == {"x": 34 / 26}


def test_padding_micro_batches_do_not_drag_a_mean_down():
    sums = MetricSums("actor", is_first=True)
    for _ in range(2):
        sums.add({"x": torch.tensor(1.0), "x/count": torch.tensor(1.0)})
    sums.add({"actor/padding_micro_batches": torch.ones(())})
    sums.add_common({"masked_rows": 1.0})
    assert logged([sums.numbers()]) == {"x": 1.0, "actor/padding_micro_batches": 1.0, "actor/masked_rows": 1.0}


def test_scores_that_are_nan_are_left_out_of_their_mean_and_a_mean_over_nothing_is_absent():
    """[0.5, nan, nan, 0.8, 0.6, 0.7] is 0.65 over 4."""
    scores = torch.tensor([0.5, math.nan, math.nan, 0.8, 0.6, 0.7])
    assert finish_metrics(finite_mean_metric("x", scores)) == pytest.approx({"x": 0.65})
    assert finish_metrics(finite_mean_metric("x", scores[1:3])) == {}


def test_a_loss_that_is_nan_on_one_rank_is_logged_as_nan():
    ranks = [{"x": value, "x/count": 1.0} for value in (0.5, math.nan)]
    assert math.isnan(logged(ranks)["x"])


def test_what_all_ranks_know_alike_is_counted_once():
    outcome = StepOutcome(grad_norm=2.0, learning_rate=0.1, was_skipped=False)
    ranks = []
    for rank in range(3):
        sums = MetricSums("actor", is_first=rank == 0)
        sums.add_step(outcome)
        ranks.append(sums.numbers())
    metrics = logged(ranks)
    assert metrics == {
        "actor/optimizer_steps": 1.0, "actor/skipped_steps": 0.0, "actor/grad_norm": 2.0, "actor/learning_rate": 0.1,
    }  # fmt: skip


def test_a_maximum_stays_a_maximum():
    assert logged([{"x/max": 1.0}, {"x/max": 3.0}]) == {"x/max": 3.0}
