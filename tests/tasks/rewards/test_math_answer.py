import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.rewards.math_answer import math_answer, verify_math
from tasks.rewards.score import Score


def grade(answer: str, response: str) -> float | None:
    return verify_math(response, answer).value


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
    assert verify_math("3", "").value is None
    assert verify_math("I do not know", "3") == Score(0.0, "no mathematical expression in the response")


def test_the_score_is_the_same_in_the_main_thread_in_another_and_in_an_event_loop() -> None:
    async def in_a_loop() -> float | None:
        return math_answer("", "1", "1", {}, limit_seconds=60.0).value

    with ThreadPoolExecutor(1) as threads:
        in_a_thread = threads.submit(math_answer, "", "1", "1", {}, limit_seconds=60.0).result(timeout=180).value
    assert math_answer("", "1", "1", {}, limit_seconds=60.0).value == 1.0
    assert in_a_thread == 1.0
    assert asyncio.run(in_a_loop()) == 1.0


def test_an_answer_that_cannot_be_computed_is_a_timeout_and_not_a_zero() -> None:
    score = math_answer("", r"\boxed{10^{10^{10}}}", "1", {}, limit_seconds=2.0)
    assert score.value is None
    assert "timeout after 2.0 s" in score.reason


@pytest.mark.slow
def test_the_score_is_the_same_inside_an_async_ray_actor() -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Grader:
        async def grade(self) -> float | None:
            return math_answer("", "1", "1", {}, limit_seconds=60.0).value

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    try:
        assert ray.get(Grader.remote().grade.remote(), timeout=240) == 1.0
    finally:
        ray.shutdown()
