import pytest
from torch import tensor

from tasks.algorithms.token_rewards import overlong_penalty as tensor_penalty
from tasks.algorithms.token_rewards import spread_scores
from tasks.rewards.exact_answer import exact_answer, positions_right
from tasks.rewards.length import overlong_penalty
from tasks.rewards.math_answer import math_answer
from tasks.rewards.numeric_answer import numeric_answer
from tasks.rewards.reasoning_gym_answer import reasoning_gym_answer
from tasks.rewards.response_format import response_format
from tasks.rewards.score import Grader, Score


def test_an_exact_answer_has_one_spelling() -> None:
    assert exact_answer("", " 12357\n", "12357", {}).value == 1.0
    assert exact_answer("", "1235", "12357", {}).value == 0.0
    assert exact_answer("", "Paris", "paris", {}).value == 0.0
    assert exact_answer("", "Paris", "paris", {}, ignore_case=True).value == 1.0


def test_positions_right_is_a_share_and_padding_the_response_does_not_help() -> None:
    assert positions_right("", "12375", "12357", {}).value == 0.6
    assert positions_right("", "12357", "12357", {}).value == 1.0
    assert positions_right("", "12357" * 2, "12357", {}).value == 0.5
    assert positions_right("", "", "12357", {}).value == 0.0
    assert positions_right("", "1", "", {}).value is None


@pytest.mark.parametrize("rule", [exact_answer, positions_right, numeric_answer, math_answer])
@pytest.mark.parametrize("answer", ["", " \n"])
def test_no_rule_that_compares_scores_a_row_without_an_answer(rule: Grader, answer: str) -> None:
    assert [rule("", response, answer, {}).value for response in ("", " ", "5")] == [None] * 3


@pytest.mark.parametrize(("length", "penalty"), [(15, 0.0), (16, -0.2), (18, -0.6), (20, -1.0), (25, -1.0)])
def test_the_overlong_penalty_ramps_before_the_maximum_and_equals_its_tensor_form(length: int, penalty: float) -> None:
    got = overlong_penalty("", "", "", {"response_length": length}, max_length=20, buffer=5).value
    assert got == pytest.approx(penalty)
    assert got == pytest.approx(tensor_penalty(tensor([length]), max_length=20, buffer=5).item())


def test_without_an_overlong_section_there_is_no_penalty_and_no_error() -> None:
    assert overlong_penalty("", "", "", {}).value == 0.0


def test_overlong_settings_and_rows_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match="buffer is 21 and max_length 20"):
        overlong_penalty("", "", "", {"response_length": 1}, max_length=20, buffer=21)
    with pytest.raises(ValueError, match=r"extra\['response_length'\] is None"):
        overlong_penalty("", "", "", {}, max_length=20, buffer=5)


def test_a_truncated_response_is_no_format_error_and_a_finished_one_keeps_its_reward() -> None:
    good = "<think>\nhm\n</think>\n<answer>4</answer>"
    cut = {"finish_reason": "length"}
    assert response_format("", "<think> and then", "", cut) == Score(None, "truncated")
    assert response_format("", "<think> and then", "", cut, truncated_score=-0.5) == Score(-0.5, "truncated")
    assert response_format("", good, "", {"finish_reason": "stop"}).value == 1.0
    assert response_format("", good, "", cut, truncated_score=-1.0).value == 1.0
    assert response_format("", "4", "", {"finish_reason": "stop"}) == Score(0.0, "format")


@pytest.mark.parametrize(
    "response",
    [
        "<answer>4</answer>",
        "<think>a</think><answer>4</answer> and more",
        "<think>a</think><answer>4</answer><answer>5</answer>",
        "<think>a<think>b</think><answer>4</answer>",
        "<think>a<think>b</think></think><answer>4</answer>",
        "<think>a<answer>4</answer></think><answer>5</answer>",
        "<think>a</think><answer><think>b</think>4</answer>",
        "<think>a</think><answer><answer>4</answer></answer>",
        "<think>a</answer></think><answer>4</answer>",
        "<think>a</think><answer>4</think></answer>",
        "<answer>4</answer><think>a</think>",
        "x <think>a</think><answer>4</answer>",
    ],
)
def test_a_response_with_anything_besides_one_thought_and_one_answer_is_malformed(response: str) -> None:
    assert response_format("", response, "", {}).value == 0.0


def test_the_pattern_of_the_format_is_an_option() -> None:
    assert response_format("", "12", "", {}, pattern=r"\d+").value == 1.0


def test_reasoning_gym_scores_with_its_own_verifier() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]
    extra = {"dataset": "basic_arithmetic", "entry": entry}
    right = entry["answer"]
    assert reasoning_gym_answer("", right, "", extra).value == 1.0
    assert reasoning_gym_answer("", f"<answer>0</answer> no: <answer> {right} </answer>", "", extra).value == 1.0
    assert reasoning_gym_answer("", "<answer>not a number</answer>", "", extra).value < 1.0  # pyright: ignore[reportOptionalOperand]
    with pytest.raises(ValueError, match="needs 'dataset' and 'entry'"):
        reasoning_gym_answer("", "1", "1", {})


def test_the_grader_sees_the_sampled_text_and_the_reward_lies_on_its_last_token() -> None:
    tokens, mask = ["assistant", "final", "TOOL_LEAK", "<pad>"], tensor([[True, True, False, False]])
    text = " ".join(token for token, sampled in zip(tokens, mask[0].tolist(), strict=True) if sampled)
    assert text == "assistant final"
    assert exact_answer("", text, "assistant final", {}).value == 1.0
    assert spread_scores(tensor([1.0]), mask).argmax().item() == 1
