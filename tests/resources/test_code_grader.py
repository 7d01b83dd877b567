"""Code graded in a box: tests run against the response, its failure is a score, a row without tests is none."""

import json
from functools import partial
from typing import Any

import pytest

from resources.code_grader import CodeSettings
from resources.grader_backends import build_backends
from resources.graders import FinishedRow, Grader, read_sample
from resources.reward_loop import RewardLoop
from resources.sandbox import SandboxLimits
from tasks.rewards.code import plan_runs, score_outputs
from tests.sandbox_here import why_no_sandbox

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

TESTS = {
    "io": [{"input": "2\n3\n", "output": "5"}],
    "calls": {"function": "add", "cases": [{"args": [1, 2], "expected": 3}, {"args": ["a", "b"], "expected": "ab"}]},
    "asserts": ["assert add(0, 0) == 0"],
}
RIGHT = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(int(input()), int(input())))"


def grade(responses: list[str], answer: Any = TESTS, *, is_partial: bool = False) -> list[float | str]:
    settings = CodeSettings(
        plan=plan_runs,
        judge=partial(score_outputs, partial=is_partial),
        limits=SandboxLimits(wall_seconds=5.0, cpu_seconds=1, memory_bytes=1 << 28),
        runs_all=is_partial,
    )
    one = Grader(name="code", kind="sandbox", backend=settings)
    record = json.dumps({"prompt": "p", "answer": answer}).encode()
    samples = [
        read_sample(FinishedRow(row_id=row, group_id=row, record=record, response_ids=(1,)), f"```python\n{text}\n```")
        for row, text in enumerate(responses)
    ]
    loop = RewardLoop([one], 2, build_backends([one], 2))
    try:
        found = loop.finish("b", samples, 120.0).grades
    finally:
        loop.close()
    grades = [found[row]["code"] for row in range(len(responses))]
    return [grade.score if grade.cause is None else grade.cause for grade in grades]


def test_right_wrong_endless_and_broken_programs_have_a_score():
    wrong = RIGHT.replace("a + b", "a * b")
    assert grade([RIGHT, wrong, "while True: pass", "def add(", "import os; os._exit(0)"]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_share_of_the_tests_counts_where_it_is_asked_for():
    only_numbers = RIGHT.replace("return a + b", "return int(a) + int(b)")
    assert grade([RIGHT, only_numbers], is_partial=True) == [1.0, 0.75]


def test_a_program_cannot_print_what_it_does_not_know():
    forger = "import os, sys\nfor i in range(9): os.write(1, f'[{i}, 3]\\n'.encode())\ndef add(a, b): return 3"
    assert grade([forger], {"calls": {"function": "add", "cases": [{"args": [5, 5], "expected": 10}]}}) == [0.0]


@pytest.mark.parametrize("answer", ["no tests", {"calls": [{"args": [1], "expected": 2}]}, {"asserts": 3}])
def test_a_row_without_tests_is_unscorable(answer: Any):
    assert grade([RIGHT], answer) == ["error"]
