"""Graders that raise, hang, lie and die, in real processes."""

import asyncio
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.rewards.grader_pool import GraderPool


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    with GraderPool(size=2, limit_seconds=1.5, modules=("time", "math")) as started:
        yield started
    assert started.num_processes() == 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hung_graders_are_killed_and_the_pool_serves_on(pool: GraderPool) -> None:
    with ThreadPoolExecutor(6) as threads:
        hung = [threads.submit(pool.grade, time.sleep, 60) for _ in range(4)]
        good = [threads.submit(pool.grade, math.sqrt, 1.0) for _ in range(2)]
        scores = [future.result(timeout=120) for future in hung + good]
    assert [score.value for score in scores] == [None] * 4 + [1.0] * 2
    assert all("timeout after 1.5 s" in score.reason for score in scores[:4])
    assert pool.grade(math.sqrt, 4.0).value == 2.0
    assert pool.num_processes() <= 2


def test_one_raising_and_one_hanging_sample_leave_the_others_their_scores(pool: GraderPool) -> None:
    calls = [(math.sqrt, 1.0), (math.sqrt, 4.0), (operator.truediv, 1, 0), (time.sleep, 60)]
    with ThreadPoolExecutor(4) as threads:
        scores = [future.result(timeout=120) for future in [threads.submit(pool.grade, *call) for call in calls]]
    assert [score.value for score in scores] == [1.0, 2.0, None, None]
    assert "grader error: ZeroDivisionError" in scores[2].reason
    assert "timeout" in scores[3].reason


def test_a_grader_that_takes_its_process_down_is_named_and_the_next_call_works(pool: GraderPool) -> None:
    assert "os._exit" not in pool.grade(math.sqrt, 1.0).reason
    assert "process died (exit 7)" in pool.grade(os._exit, 7).reason
    assert pool.grade(math.sqrt, 9.0).value == 3.0


def test_a_grader_that_ignores_the_process_and_busy_loops_in_c_is_ended(pool: GraderPool) -> None:
    assert "timeout" in pool.grade(pow, 10, 10**9).reason, "one long call that holds the interpreter's lock"


def test_what_is_no_number_is_unscorable_with_a_reason(pool: GraderPool) -> None:
    assert "returned None" in pool.grade(time.sleep, 0).reason
    assert "returned inf" in pool.grade(float, "inf").reason
    assert "returned str" in pool.grade(str, 1).reason
    assert "cannot pickle" in pool.grade(threading.Lock).reason


def test_no_free_process_is_a_reason_and_not_a_hang() -> None:
    with GraderPool(size=1, limit_seconds=30.0) as pool, ThreadPoolExecutor(1) as threads:
        threads.submit(pool.grade, time.sleep, 20)
        while pool.num_processes() == 0:
            time.sleep(0.01)
        assert "no grader process came free within 0.1 s" in pool.grade(math.sqrt, 1.0, wait_seconds=0.1).reason
        pool.close()


def test_a_grader_works_from_the_main_thread_another_thread_and_an_event_loop(pool: GraderPool) -> None:
    async def in_a_loop() -> float | None:
        return pool.grade(math.sqrt, 1.0).value

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(pool.grade, math.sqrt, 1.0).result(timeout=60).value == 1.0
    assert pool.grade(math.sqrt, 1.0).value == 1.0
    assert asyncio.run(in_a_loop()) == 1.0


def test_a_user_module_on_the_path_reaches_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_grader_of_vowels.py").write_text(
        "def count(prompt, response, answer, extra, *, per=1):\n    return per * sum(c in 'aeiou' for c in response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_grader_of_vowels  # pyright: ignore[reportMissingImports]

    with GraderPool(size=1, limit_seconds=10.0) as pool:
        assert pool.grade(my_grader_of_vowels.count, "", "aloe", "", {}, per=2).value == 6.0


def test_a_grader_process_ends_with_its_parent_even_while_it_grades() -> None:
    program = (
        "import os, time\n"
        "from tasks.rewards.grader_pool import GraderPool\n"
        "pool = GraderPool(size=1, limit_seconds=500)\n"
        "print(int(pool.grade(os.getpid).value), flush=True)\n"
        "pool.grade(time.sleep, 400)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize(("size", "limit"), [(0, 1.0), (1, 0.0), (-1, 1.0)])
def test_nonsense_sizes_and_limits_are_refused(size: int, limit: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        GraderPool(size=size, limit_seconds=limit)
