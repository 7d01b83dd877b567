"""Validation: what n samples of a known policy come to, with intervals, per source."""

import pytest

from resources.graders import Sample
from tasks.on_samples import EVERY_SOURCE, summarise_evaluation
from tasks.rewards.final_answer import final_answer
from tasks.validation import validation_metrics
from tests.tasks.local_cast import SmallCast, small_config
from tests.tasks.rows import scored_rows

HELD_OUT = (
    "validation.sources=[{name: a, kind: sorting, size: 300, options: {num_digits: 5}},"
    " {name: b, kind: sorting, size: 90, options: {num_digits: 3}}]"
)


@pytest.mark.parametrize("accuracy", [0.3, 0.7])
def test_the_intervals_cover_the_exact_values_of_a_known_policy(small_cast: SmallCast, accuracy: float):
    config = small_config(
        "validation.num_prompts=160",
        "validation.samples_per_prompt=4",
        "validation.greedy=false",
        HELD_OUT,
        script={"mode": "answer", "accuracy": accuracy},
    )
    metrics = small_cast.run(config, fresh=["rollout"]).validate()
    wrong = 1.0 - accuracy
    one_right = 4 * accuracy * wrong**3
    exact = {
        "sampled_accuracy": accuracy,
        "best_at_4": 1.0 - wrong**4,
        # Two of four win, since wrong answers differ from each other; one of four shares with three others.
        "majority_at_4": 1.0 - wrong**4 - one_right + one_right / 4,
    }
    for name, value in exact.items():
        low, high = metrics[f"validation/{name}/low"], metrics[f"validation/{name}/high"]
        assert low <= value <= high, (name, low, value, high)
        assert low < metrics[f"validation/{name}"] < high
    assert {"validation/source/a/best_at_4", "validation/source/b/sampled_accuracy/low"} <= metrics.keys()


def test_validation_asks_the_same_prompts_with_the_same_seeds_every_time(small_cast: SmallCast):
    run = small_cast.run(small_config())
    assert run.validate() == run.validate()


def sample(group_id: int, response: str, source: str, *, is_lost: bool = False) -> Sample:
    return Sample(
        row_id=0, group_id=group_id, prompt="", response=response, answer="", source=source, index=0, extra={},
        finish_reason=2 if is_lost else 0, response_length=1, is_lost=is_lost,
    )  # fmt: skip


def test_a_summary_is_over_prompts_and_once_more_over_those_of_each_source():
    samples = [sample(0, "4", "x"), sample(0, "4.0", "x"), sample(0, "5", "x"), sample(1, "1", "y")]
    told = summarise_evaluation(samples, scored_rows([1.0, 1.0, 0.0, 0.0]), None, seed=0)
    assert told[EVERY_SOURCE]["mean"] == pytest.approx((2 / 3 + 0.0) / 2)
    assert told[EVERY_SOURCE]["best"] == 0.5
    assert told["x"]["majority"] == 1.0  # 4 and 4.0 are one answer
    assert told["y"]["mean"] == 0.0


def test_an_unscorable_prompt_is_counted_and_left_out():
    told = summarise_evaluation(
        [sample(0, "4", "x"), sample(1, "5", "x")], scored_rows([1.0, float("nan")]), None, seed=0
    )
    metrics = validation_metrics(told, "accuracy", 1)
    assert metrics["validation/accuracy"] == 1.0
    assert metrics["validation/unscorable_prompts"] == 1.0
    assert not any(name.startswith("validation/source/") for name in metrics)  # a lone source is the whole


def test_responses_that_nobody_answered_are_counted_with_their_source_and_left_out():
    samples = [sample(0, "4", "x"), sample(0, "", "x", is_lost=True), sample(1, "5", "y")]
    told = summarise_evaluation(samples, scored_rows([1.0, float("nan"), 0.0]), None, seed=0)
    metrics = validation_metrics(told, "sampled_accuracy", 2)
    assert metrics["validation/sampled_accuracy"] == 0.5
    assert {name: value for name, value in metrics.items() if name.endswith("lost_responses")} == {
        "validation/sampled_accuracy/lost_responses": 1.0,
        "validation/source/x/sampled_accuracy/lost_responses": 1.0,
    }


@pytest.mark.parametrize(
    ("response", "answer"), [("#### 1,000", "1000"), (r"\boxed{x+1}", "x+1"), (r"\boxed{0.5}", "1/2"), (" no ", "no")]
)
def test_answers_that_mean_the_same_are_spelt_the_same(response: str, answer: str):
    assert final_answer(response) == answer
