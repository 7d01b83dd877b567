import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from resources.grader_pool import GraderPool, PoolFunction
from resources.graders import GraderFailedError
from tasks.rewards.math_answer import math_answer
from tasks.rewards.score import Score


def grade(answer: str, response: str) -> float | None:
    return math_answer("", response, answer, {}).value


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        (r"$\frac{1}{2004!}$", r"$\frac{1}{2006!}$"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("10000000000000000000001", r"\boxed{10000000000000000000000}"),
    ],
)
def test_numbers_are_not_equal_because_they_are_tiny_or_huge(gold: str, response: str) -> None:
    assert grade(gold, response) == 0.0
    assert grade(gold, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("4", r"$4\sqrt(2)$", 0.0),
        ("80000", r"\$80,000", 1.0),
        (r"\frac{2}{3}", "2/3", 1.0),
        (r"\frac12", r"\frac{1}{2}", 1.0),
        ("3", r"first \boxed{2} then \boxed{3}", 1.0),
        ("3", r"first \boxed{3} then \boxed{2}", 0.0),
        ("840", r"\boxed{840}. so \boxed{840}", 1.0),
        ("x+1", "$1+x$", 1.0),
        ("x+1", "1+x", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        ("[8.124, 12.852]", "[8.124,12.852]", 1.0),
        ("[8.124, 12.852]", "[8.124,12.853]", 0.0),
        ("B", "A", 0.0),
        ("1/2", r"\frac{1}{2}.", 1.0),
        (r"\sqrt{2}/2", r"\boxed{\frac{1}{\sqrt{2}}}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("(1,2)", r"\boxed{(2, 1)}", 0.0),
        (r"\pi", r"\boxed{3.14159265}", 1.0),
        (r"\pi", r"\boxed{3.15}", 0.0),
    ],
)
def test_mathematical_equality_by_hand(gold: str, response: str, score: float) -> None:
    assert grade(gold, response) == score


def test_nothing_to_read_in_the_answer_is_unscorable_and_in_the_response_is_wrong() -> None:
    assert grade("", "3") is None
    assert math_answer("", "I do not know", "3", {}) == Score(0.0, "no mathematical expression in the response")


def test_the_score_is_the_same_in_the_main_thread_in_another_and_in_an_event_loop() -> None:
    async def in_a_loop() -> float | None:
        return grade("1", "1")

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(grade, "1", "1").result(timeout=180) == 1.0
    assert grade("1", "1") == 1.0
    assert asyncio.run(in_a_loop()) == 1.0


def test_an_answer_that_cannot_be_computed_is_a_timeout_and_not_a_zero() -> None:
    async def grade_in_a_process() -> float:
        pool = GraderPool([PoolFunction(target="tasks.rewards.math_answer:math_answer", modules=("math_verify",))], 1)
        await pool.start()
        try:
            row = {"prompt": "", "response": r"\boxed{10^{10^{10}}}", "answer": "1", "extra": {}}
            return (await pool.call(0, row, timeout=2.0))[0]
        finally:
            await pool.close()

    with pytest.raises(GraderFailedError, match="took longer than 2 s; its process was ended"):
        asyncio.run(grade_in_a_process())
