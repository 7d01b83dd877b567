"""Which ranks a step's spans are of: all that it asked, each under its duty."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.reward_export import export_reward_model
from resources.models.value_head import build_value_model
from tasks.host import use_host
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.step import Step, StepResult
from tasks.validation import validation
from tests.tasks.local_cast import SmallCast, small_config
from tests.tasks.local_run import LocalRun


def result_of(run: LocalRun, step: Step, *more: Any) -> StepResult:
    """The step's result with its spans, which a task host takes off."""
    with use_host(run.context):
        return step.fn(run.state.stamp(run.config, 1), *more)


@contextmanager
def with_graders(cast: SmallCast, *settings: str) -> Iterator[StepResult]:
    """The result of a reward step whose workers were made for these settings."""
    run = cast.run(small_config("algorithm.name=grpo", *settings), fresh=["reward"])
    try:
        yield result_of(run, reward, result_of(run, rollout, 0).handle)
    finally:
        run.context.groups["reward"].call("close")


def duties(result: StepResult) -> Counter[str]:
    return Counter(span.duty for span in result.spans)


def test_a_rollout_with_a_greedy_baseline_tells_of_its_grading_too(small_cast: SmallCast):
    run = small_cast.run(small_config("algorithm.name=remax"))
    sampled = result_of(run, rollout, 0)
    assert duties(sampled) == {"rollout": 2, "reward": 1, "advantage": 1}
    [grader] = sampled.facts["graders"]
    assert grader["calls"] == 8  # one greedy response a prompt
    assert "rows" not in sampled.facts
    assert "solved" not in sampled.facts


def test_a_rollout_that_is_refilled_tells_of_every_round_and_its_grading(small_cast: SmallCast):
    config = small_config("algorithm.name=dapo", "data.prompts_per_iteration=32", "rollout.group_size=2")
    sampled = result_of(small_cast.run(config), rollout, 0)
    rounds = int(sampled.metrics["rollout/refill_rounds"]) + 1
    assert rounds > 1
    assert duties(sampled) == {"rollout": rounds, "reward": rounds}
    [grader] = sampled.facts["graders"]
    assert grader["calls"] == 2 * sampled.metrics["rollout/groups_sampled"]
    run = small_cast.run(small_config("algorithm.name=grpo"))
    [whole] = result_of(run, reward, result_of(run, rollout, 0).handle).facts["graders"]
    assert grader["workers"] == whole["workers"], "as many calls at once in two rounds as in one"


def test_a_validation_tells_of_sampling_grading_and_the_summary(small_cast: SmallCast):
    run = small_cast.run(small_config("validation.greedy=true"), fresh=["rollout"])
    assert duties(result_of(run, validation, 0)) == {"rollout": 2, "reward": 4}


def test_a_reward_step_with_normalisation_tells_of_the_grading_before_it(small_cast: SmallCast):
    with with_graders(small_cast, "reward.normalise=true") as scored:
        assert duties(scored) == {"reward": 2}
        first, second = scored.spans
        assert first.end <= second.start


def test_a_reward_step_tells_of_its_reward_model_which_is_a_grader_of_kind_model(small_cast: SmallCast, tmp_path: Path):
    plain = small_config()
    scalar = build_value_model(plain.model, seed=3)
    export_reward_model(tmp_path, scalar.model.config, build_character_tokenizer(), scalar.state_dict())
    sizes = "num_layers: 1, hidden_size: 16, intermediate_size: 32, num_heads: 4, vocab_size: 128, max_positions: 64"
    graders = [
        "{name: rule, kind: rule, function: exact_answer}",
        f"{{name: rm, kind: model, model: {{path: {tmp_path}, shape: {{{sizes}}}}}}}",
    ]
    with with_graders(small_cast, f"reward.graders=[{', '.join(graders)}]") as scored:
        told = {grader["name"]: grader for grader in scored.facts["graders"]}
    assert duties(scored) == {"reward_model.rm": 1, "reward": 1}
    model, own = scored.spans
    assert model.end <= own.start
    assert (told["rm"]["kind"], told["rm"]["calls"], told["rm"]["workers"]) == ("model", 1, 1)
    assert told["rm"]["total_seconds"] == model.execute_seconds
    assert told["rule"]["calls"] == 32
