import math
from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor, tensor

from resources.workers.metric_sums import MetricSums
from tasks.algorithms.diagnostics import (
    explained_variance,
    finish_metrics,
    finite_mean_metric,
    mean_metric,
    policy_movement,
    sample_entropy,
)
from tasks.replies import add_sums

NAN = math.nan


def part(mean: float, count: int) -> dict:
    return mean_metric("x", torch.full((max(count, 1),), mean), torch.arange(max(count, 1)) < count)


def merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """The sums of micro-batches on one rank."""
    sums = MetricSums("actor", is_first=True)
    for one in parts:
        sums.add(one)
    return sums.numbers()


def test_a_mean_is_over_all_tokens_and_not_over_micro_batches() -> None:
    parts = [part(1.0, 8), part(1.0, 8), part(1.0, 8), part(5.0, 2)]
    assert finish_metrics(merged(parts)) == {"x": pytest.approx(34 / 26)}
    assert finish_metrics(merged([*parts, part(0.0, 0)])) == {"x": pytest.approx(34 / 26)}


def test_padding_drags_no_mean_and_masked_rows_are_counted_apart() -> None:
    real = part(1.0, 4) | {"masked_rows": tensor(0.0), "padding": tensor(0.0)}
    masked = part(0.0, 0) | {"masked_rows": tensor(1.0), "padding": tensor(0.0)}
    padding = part(0.0, 0) | {"masked_rows": tensor(0.0), "padding": tensor(1.0)}
    assert finish_metrics(merged([real, real, masked, padding])) == {"x": 1.0, "masked_rows": 1.0, "padding": 1.0}


def test_a_nan_score_is_left_out_of_its_mean_and_all_nan_is_absent() -> None:
    metric = finite_mean_metric("x", tensor([0.5, NAN, NAN, 0.8, 0.6, 0.7]))
    assert finish_metrics(metric) == {"x": pytest.approx(0.65)}
    assert metric["x/count"] == 4
    assert finish_metrics(finite_mean_metric("x", tensor([NAN, NAN]))) == {}


def test_metrics_may_be_merged_in_stages_and_maxima_are_compared() -> None:
    parts = [part(float(i), i) | {"y/max": tensor(float(-i))} for i in range(1, 5)]
    staged = add_sums([merged(parts[:1]), merged(parts[1:])])
    assert finish_metrics(staged) == finish_metrics(merged(parts)) == {"x": 3.0, "y/max": -1.0}


def test_a_nan_measure_is_not_lost_in_a_merge() -> None:
    finished = finish_metrics(
        merged([{"y/max": tensor(NAN), "z": tensor(1.0)}, {"y/max": tensor(1.0), "z": tensor(NAN)}])
    )
    assert math.isnan(finished["y/max"])
    assert math.isnan(finished["z"])


def test_policy_movement_by_hand() -> None:
    finished = finish_metrics(policy_movement(tensor([[0.1, -0.3, NAN]]), tensor([[True, True, False]])))
    kl = (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 2
    assert finished["actor/approx_kl"] == pytest.approx(kl, abs=1e-7)
    assert finished["actor/log_ratio/max"] == pytest.approx(0.3)
    assert finished["actor/ratio"] == pytest.approx((math.exp(0.1) + math.exp(-0.3)) / 2)


def test_sample_entropy_does_not_read_sentinels_on_padding() -> None:
    log_probs = tensor([[-1.0, -2.0, 1.0]])
    finished = finish_metrics(sample_entropy(log_probs, tensor([[True, True, False]])))
    assert finished == {"actor/sample_entropy": 1.5}
    assert -log_probs.mean() == pytest.approx(0.6666667), "what the sentinel would make of it"


def test_explained_variance_by_hand() -> None:
    returns, mask = tensor([[1.0, 2.0, 3.0, NAN]]), tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == 0.0
    assert explained_variance(tensor([[1.0, 2.0, 5.0, 0.0]]), returns, mask).item() == pytest.approx(1 - 4 / 3)
    assert explained_variance(returns, torch.ones(1, 4), mask).isnan(), "nothing varies, nothing to explain"


def test_bfloat16_values_are_summed_and_counted_in_float32() -> None:
    metric = mean_metric("x", torch.full((301,), 1.0, dtype=torch.bfloat16), torch.ones(301, dtype=torch.bool))
    assert metric["x/count"] == 301, "bfloat16 knows 300 and 302"
    assert metric["x"] == 301
