"""Code rewards without running anything: what is taken for code, which programs are planned, what outputs are worth."""

import json
import re
from typing import Any

import pytest

from tasks.rewards.code import Output, extract_code, is_same, plan_runs, read_tests, score_outputs

BLOCK = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
CALLS = {"calls": {"function": "add", "cases": [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]}}
IO = {"io": [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}]}


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (BLOCK, "def add(a, b):\n    return a + b\n"),
        ("```\nx = 1\n```\nno, ```py\nx = 2\n```", "x = 2\n"),
        ("```bash\nls\n```", None),
        ("```python\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_code_is_the_last_python_block_or_a_whole_program(response: str, code: str | None):
    assert extract_code(response) == code


def test_expected_values_and_outputs_never_reach_the_program():
    tests = {"calls": {"function": "add", "cases": [{"args": [1, 2], "expected": 31337}]}}
    hidden = {"io": [{"input": "1 2", "output": "31337"}]}
    assert "31337" not in str(plan_runs(BLOCK, tests, {})) + str(plan_runs(BLOCK, hidden, {}))


def test_a_run_for_each_input_and_one_for_all_calls():
    assert len(plan_runs(BLOCK, {**IO, **CALLS}, {})) == 3
    assert plan_runs("no code", IO, {}) == []


@pytest.mark.parametrize(
    ("outputs", "whole", "share"),
    [
        ([(True, "3\n"), (True, "4  \n\n")], 1.0, 1.0),
        ([(True, "3"), (True, "5")], 0.0, 0.5),
        ([(True, "3"), (False, "4")], 0.0, 0.5),
        ([(True, "3")], 0.0, 0.5),
        ([], 0.0, 0.0),
    ],
)
def test_outputs_are_compared_line_by_line(outputs: list[Output], whole: float, share: float):
    assert score_outputs(IO, {}, outputs) == whole
    assert score_outputs(json.dumps(IO), {}, outputs, partial=True) == share


@pytest.mark.parametrize(
    ("stdout", "share"),
    [
        ("[0, 3]\n[1, 4]\n", 1.0),
        ("[0, 3]\n[0, 4]\n[1, 5]\n", 0.5),
        ("[0, true]\nnonsense\n[[]]\n{}\n[1, 4.0]", 0.5),
        ("", 0.0),
    ],
)
def test_values_of_calls_are_compared_as_json(stdout: str, share: float):
    assert score_outputs(CALLS, {}, [(True, stdout)], partial=True) == share


def test_tests_in_extra_come_before_the_answer_and_a_list_is_asserts():
    assert read_tests("irrelevant", {"tests": ["assert add(1, 2) == 3"]}).asserts == ("assert add(1, 2) == 3",)
    assert score_outputs("", {"tests": ["assert True"]}, [(True, "[0, true]\n")]) == 1.0


@pytest.mark.parametrize("answer", ["42", "no json", {}, {"io": []}, None])
def test_a_row_without_tests_cannot_be_scored(answer: Any):
    with pytest.raises(ValueError, match="the row"):
        read_tests(answer, {})


CASE = {"args": [1], "expected": 2}
MALFORMED = {
    "give an object with function and cases": {"calls": [CASE]},
    "the row's calls name function None; give": {"calls": {"cases": [CASE]}},
    "the row's calls name function 3; give": {"calls": {"function": 3, "cases": [CASE]}},
    "among its cases; give objects with args and expected": {"calls": {"function": "f", "cases": [[1, 2]]}},
    "expected': 2}\" among its cases; give": {"calls": {"function": "f", "cases": [{"expected": 2}]}},
    "the row's cases are": {"calls": {"function": "f", "cases": CASE}},
    "a case whose args are 'ab'; give a list": {"calls": {"function": "f", "cases": [{"args": "ab", "expected": 2}]}},
    "among its io; give objects with input and output": {"io": ["1 2"]},
    "the row's io are": {"io": {"input": "1", "output": "2"}},
    "'1'}\" among its io; give": {"io": [{"input": "1"}]},
    "the row's asserts are 'assert True'; give a list": {"asserts": "assert True"},
    "the row has 3 among its asserts; give lines of Python": {"asserts": [3]},
    "the row has None among its asserts": [None],
    "the row's tests are no JSON": "[" * 5000,
}


@pytest.mark.parametrize(("why", "answer"), MALFORMED.items())
def test_tests_of_another_shape_are_no_tests_and_the_message_says_what_to_give(why: str, answer: Any):
    with pytest.raises(ValueError, match=re.escape(why)) as told:
        plan_runs(BLOCK, answer, {})
    assert str(told.value).startswith("the row")


SAME = [(1, 1.0), (None, None), ([1, [2.0]], [1, [2]]), (0.1 + 0.2, 0.3)]
DIFFERENT = [(True, 1), ("1", 1), ({"a": 1}, {"a": 1, "b": 2}), (1, 2), ([1], [1, 1])]


def test_values_are_the_same_only_as_json():
    assert [pair for pair in SAME if not is_same(*pair)] == []
    assert [pair for pair in DIFFERENT if is_same(*pair)] == []


@pytest.mark.parametrize(
    ("value", "expected", "is_equal"),
    [
        (1_000_001, 1_000_000, False),
        (10**18 + 1, 10**18, False),
        (2.9999999996, 3, True),
        (3, 3.0000000004, True),
        (2.9, 3, False),
        (10**400, 10**400, True),
        (10**400, 1.0, False),
        (1.0, 10**400, False),
        (float("inf"), 10**400, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True),
        ([1_000_001], [1_000_000], False),
    ],
)
def test_whole_numbers_are_compared_exactly_and_floats_within_a_millionth(value: Any, expected: Any, is_equal: bool):
    assert is_same(value, expected) == is_equal
