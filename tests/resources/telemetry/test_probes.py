"""Probes: slots over time, lengths, latencies, operations."""

import pytest

from resources.telemetry.facts import FACTS
from resources.telemetry.flops import flop_utilisation, model_flops
from resources.telemetry.probes import GraderLatency
from resources.telemetry.rollout_gauge import (
    RolloutGauge,
    fit_decode_cost,
    group_long_tail_seconds,
    histogram_edge,
    response_length_facts,
)


def gauge(slots: int, *times: float) -> RolloutGauge:
    return RolloutGauge(slots, clock=iter(times).__next__)


def test_the_tail_is_the_time_with_fewer_than_a_quarter_of_the_slots_busy():
    probe = gauge(8, 0.0, 0.0, 1.0, 3.0, 6.0)
    probe.observe(running=8)
    probe.observe(running=2)  # two of eight is a quarter, not fewer
    probe.observe(running=1)
    assert probe.facts()["long_tail_seconds"] == 3.0


def test_few_running_while_others_wait_is_starvation_and_no_tail():
    probe = gauge(8, 0.0, 0.0, 4.0)
    probe.observe(running=1, waiting=20, kv_cache_use=1.0, preemptions=3)
    facts = probe.facts()
    assert facts["long_tail_seconds"] == 0.0
    assert facts["starved_seconds"] == pytest.approx(4.0 * 7 / 8)
    assert (facts["preemptions"], facts["kv_cache_use_max"], facts["kv_cache_use_mean"]) == (3, 1.0, 1.0)


def test_decode_cost_is_split_into_steps_and_tokens():
    """A step costs 10 ms and each token 1 ms: 100 steps at 8 running take 1.8 s, 200 at 2 take 2.4 s."""
    probe = gauge(8, 0.0, 0.0, 1.8, 4.2, 4.2)
    probe.observe(running=8, tokens=0)
    probe.observe(running=2, tokens=800)
    probe.observe(running=0, tokens=1200)
    facts = probe.facts()
    assert facts["decode_step_seconds"] == pytest.approx(0.010)
    assert facts["decode_token_seconds"] == pytest.approx(0.001)


def test_a_step_whose_slots_were_refilled_is_one_step():
    """Eight slots; two rows end in the first step, two that waited take part in the second: 8 tokens each, 10 ms."""
    probe = gauge(8, 0.0, 0.0, 0.010, 0.020, 0.020)
    probe.observe(running=8, waiting=2, tokens=0)
    probe.observe(running=6, waiting=2, tokens=8, steps=1)
    probe.observe(running=8, waiting=0, tokens=16, steps=1)
    facts = probe.facts()
    assert facts["decode_steps"] == 2
    assert facts["decode_step_seconds"] + 8 * facts["decode_token_seconds"] == pytest.approx(0.010)


def test_a_batch_that_never_changes_size_cannot_split_the_cost_but_explains_it():
    step, token = fit_decode_cost([100.0**2, 100.0 * 800, 800.0**2, 100.0 * 2, 800.0 * 2]) or (0.0, 0.0)
    assert step * 100 + token * 800 == pytest.approx(2.0)
    assert fit_decode_cost([0.0] * 5) is None


def test_engines_together_have_a_tail_only_when_all_are_nearly_empty():
    long_one = (0.0, 8, [[0.0, 8], [2.0, 1], [10.0, 0]])
    busy_one = (0.0, 8, [[0.0, 8], [6.0, 0]])
    assert group_long_tail_seconds([long_one, busy_one]) == pytest.approx(4.0)


def test_a_long_series_keeps_its_ends_and_at_most_65_points():
    times = [0.0] + [float(t) for t in range(1000)] + [1000.0]
    probe = RolloutGauge(1000, clock=iter(times).__next__)
    for running in range(1000, 0, -1):
        probe.observe(running=running)
    series = probe.facts()["running"]
    assert len(series) <= 66
    assert series[0] == [0.0, 1000]
    assert series[-1] == [1000.0, 0]


def test_length_facts_are_of_the_lengths_given():
    facts = response_length_facts([2, 2, 2, 2])
    assert (facts["response_length_max"], facts["response_length_mean"]) == (2, 2.0)
    assert facts["response_length_histogram"] == {"2": 4}
    assert response_length_facts([]) == {}


def test_a_histogram_edge_is_never_above_the_length():
    assert all(histogram_edge(length) <= length for length in range(1, 5000))


def test_one_slow_call_is_counted_and_the_median_stays():
    latency = GraderLatency("judge-a", "judge", workers=4)
    for _ in range(49):
        latency.add(0.01)
    latency.add(3.0, timed_out=True)
    facts = latency.facts()
    assert (facts["calls"], facts["slow_calls"], facts["timeouts"], facts["max_seconds"]) == (50, 1, 1, 3.0)
    assert facts["p95_seconds"] == pytest.approx(0.01)
    assert GraderLatency("none", "rule").facts()["calls"] == 0


def test_training_needs_three_times_the_operations_of_a_forward():
    sizes = {"num_parameters": 1000, "num_layers": 2, "hidden_size": 8, "tokens": 10, "mean_length": 4.0}
    assert model_flops(**sizes, is_training=False) == 10 * (2000 + 2 * 2 * 8 * 4)
    assert model_flops(**sizes, is_training=True) == 3 * model_flops(**sizes, is_training=False)
    assert flop_utilisation(989e12, 2.0, "H100") == 0.5
    assert flop_utilisation(1.0, 1.0, "a CPU") is None


def test_the_gauge_only_uses_documented_names():
    probe = RolloutGauge(4)
    probe.observe(running=1, waiting=2, kv_cache_use=0.5, tokens=0)
    probe.observe(running=2, waiting=0, kv_cache_use=0.5, tokens=9)
    assert {*probe.facts(), *response_length_facts([3])} <= set(FACTS)


@pytest.mark.parametrize(("longest", "slow"), [(0.05, 0), (4.0, 1)])
def test_jitter_is_no_slow_call_alone_or_beside_a_really_slow_one(longest: float, slow: int):
    """Calls of a millisecond, a few of 30 ms as on a busy machine, and one of `longest` seconds."""
    latency = GraderLatency("exact", "rule")
    for seconds in [0.001] * 40 + [0.03] * 5 + [longest]:
        latency.add(seconds)
    assert latency.facts()["slow_calls"] == slow
