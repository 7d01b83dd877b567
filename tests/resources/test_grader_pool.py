"""The grader pool: limits, deaths, leaks and stray processes; whole again after each."""

import asyncio
import contextlib
import functools
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resources.grader_pool import GraderImportError, GraderPool, PoolFunction
from resources.graders import GraderFailedError
from resources.process_facts import is_running, processes_with_environment
from tests.alone import alone

GRADERS = """
import asyncio, os, signal, subprocess, sys, threading, time

def right(response, answer): return float(response == answer)
def sleep(response): time.sleep(float(response)); return 1.0
async def later(response): await asyncio.sleep(0.01); return 0.5
def raises(response): raise KeyError("no " + response)
def leaves(response): raise SystemExit(3)
def dies(response): os.kill(os.getpid(), signal.SIGKILL)
def kills_parent(response):
    with open(f"/proc/{os.getppid()}/cmdline") as file: assert "grader_process" in file.read()
    os.kill(os.getppid(), signal.SIGKILL); time.sleep(5)
def leaks(response):
    for _ in range(40): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 1.0
def daemonises(response):
    program = "import os,time\\nif os.fork(): os._exit(0)\\nos.setsid()\\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program])
    child.wait()
    return 1.0
def pid(response): return os.getpid()
def main_thread(response):
    signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1); signal.alarm(0)
    return 1.0
def burns(response):
    end = time.process_time() + float(response)
    while time.process_time() < end: pass
    return 1.0
def modules(response): return [float(name in sys.modules) for name in ("torch", "ray", "numpy", "prefect")]
"""
NAMES = (
    "right", "sleep", "later", "raises", "leaves", "dies", "kills_parent", "leaks", "daemonises", "pid", "main_thread",
    "burns", "modules",
)  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "pool_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CALLSHEET_POOL_TEST", str(tmp_path))
    yield "pool_graders"
    assert not {
        pid
        for pid in processes_with_environment("CALLSHEET_POOL_TEST", str(tmp_path))
        if pid != os.getpid() and is_running(pid)
    }


async def outcome(pool: GraderPool, name: str, response: str = "", timeout: float = 30.0, **more: Any) -> Any:
    """The answer, or the cause of the failure."""
    try:
        value, _ = await pool.call(NAMES.index(name), {"response": response, **more}, timeout)
    except GraderFailedError as error:
        return error.cause
    return value


def run(module: str, test: Any, processes: int = 2) -> Any:
    async def body() -> Any:
        pool = GraderPool([PoolFunction(target=f"{module}:{name}", options={}) for name in NAMES], processes)
        await pool.start()
        try:
            return await test(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


def test_answers_of_plain_and_async_functions_come_back(module: str):
    async def test(pool: GraderPool) -> Any:
        return await asyncio.gather(
            outcome(pool, "right", "4", answer="4"), outcome(pool, "right", "5", answer="4"), outcome(pool, "later")
        )

    assert run(module, test) == [1.0, 0.0, 0.5]


def test_a_hung_grader_is_ended_and_the_pool_is_whole_again(module: str):
    async def test(pool: GraderPool) -> Any:
        began = time.monotonic()
        hung = [outcome(pool, "sleep", "60", timeout=1.0) for _ in range(4)]
        found = await asyncio.gather(*hung, *(outcome(pool, "right", "4", answer="4") for _ in range(2)))
        seconds = time.monotonic() - began
        pool.shrink()
        await wait_for(lambda: len(pool.pids) == 2)
        return found, seconds, pool.size

    found, seconds, size = run(module, test)
    assert found == ["timeout"] * 4 + [1.0, 1.0]
    assert size == 2
    assert seconds < 30, "four graders that sleep a minute each were waited for"


@pytest.mark.parametrize("name", ["raises", "leaves", "dies", "kills_parent"])
def test_a_grader_that_raises_or_dies_is_an_error_and_the_next_call_works(module: str, name: str):
    async def test(pool: GraderPool) -> Any:
        return await outcome(pool, name, "x"), await outcome(pool, "right", "4", answer="4")

    assert run(module, test) == ("error", 1.0)


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """A block in which this process can open so many files more, and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(min(soft, 4096)) if not os.path.lexists(f"/proc/self/fd/{number}")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[descriptors], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _short_of(descriptors: int, pool: GraderPool) -> Any:
    assert await outcome(pool, "right", "4", answer="4") == 1.0
    os.kill(pool._forker.pid, signal.SIGKILL)  # pyright: ignore[reportOptionalMemberAccess]
    await wait_for(lambda: not is_running(pool.pids[0]))  # it ends with its forker
    held = len(os.listdir("/proc/self/fd"))
    with room_for(descriptors):
        failed = await asyncio.wait_for(outcome(pool, "right", "4", answer="4"), 60.0)
    after = await asyncio.wait_for(outcome(pool, "right", "4", answer="4"), 60.0)
    return failed, after, pool.size, len(os.listdir("/proc/self/fd")) - held


@pytest.mark.parametrize("descriptors", [0, 1, 2, 4])
def test_a_node_out_of_descriptors_fails_a_call_and_the_next_one_works(module: str, descriptors: int):
    """None is left for a process's connection, for the forker's, or for what starts the forker.

    Each takes two; the dead process's connection gives one back, and so does the dead forker's.
    """
    assert alone(run, module, functools.partial(_short_of, descriptors), 1) == ("error", 1.0, 1, 0)


async def _unable_to_look(pool: GraderPool) -> Any:
    asleep = asyncio.create_task(outcome(pool, "sleep", "60", timeout=60.0))
    await wait_for(lambda: pool._busy)
    with room_for(0):
        waiting = asyncio.create_task(outcome(pool, "right", "4", answer="4"))
        await asyncio.sleep(0.2)
    later = await asyncio.wait_for(outcome(pool, "right", "5", answer="4"), 30.0)
    found = await asyncio.wait_for(waiting, 30.0), later
    asleep.cancel()
    return found


def test_a_pool_that_could_not_look_at_its_processes_grows_again_with_the_next_call(module: str):
    assert alone(run, module, _unable_to_look, 1) == (1.0, 0.0)


def test_a_process_with_leaked_threads_is_replaced(module: str):
    async def test(pool: GraderPool) -> Any:
        before = await outcome(pool, "pid")
        answer = await outcome(pool, "leaks")
        return before, answer, await outcome(pool, "pid")

    before, answer, after = run(module, test, processes=1)
    assert answer == 1.0
    assert after != before


def test_a_daemon_that_a_grader_starts_is_ended(module: str, tmp_path: Path):
    async def test(pool: GraderPool) -> Any:
        assert await outcome(pool, "daemonises") == 1.0
        known = {pool._forker.pid, os.getpid(), *pool.pids}  # pyright: ignore[reportOptionalMemberAccess]
        await wait_for(lambda: set(processes_with_environment("CALLSHEET_POOL_TEST", str(tmp_path))) <= known)

    run(module, test)


def test_graders_run_on_the_main_thread(module: str):
    async def test(pool: GraderPool) -> Any:
        return await outcome(pool, "main_thread")

    assert run(module, test) == 1.0


def test_grader_processes_load_nothing_heavy(module: str):
    async def test(pool: GraderPool) -> Any:
        return await outcome(pool, "modules")

    assert run(module, test) == [0.0, 0.0, 0.0, 0.0]


def test_waiting_graders_overlap_beyond_the_configured_processes(module: str):
    async def test(pool: GraderPool) -> Any:
        sizes = []

        async def watch() -> None:
            while True:
                sizes.append(pool.size)
                await asyncio.sleep(0.02)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(outcome(pool, "sleep", "0.5") for _ in range(12)))
        watcher.cancel()
        pool.shrink()
        return max(sizes), pool.size

    most, after = run(module, test)
    assert most > 6
    assert after == 2


def test_computing_graders_stay_within_the_configured_processes(module: str):
    async def test(pool: GraderPool) -> Any:
        sizes = []
        calls = [asyncio.create_task(outcome(pool, "burns", "0.4")) for _ in range(4)]
        while not all(call.done() for call in calls):
            sizes.append(pool.size)
            await asyncio.sleep(0.02)
        return max(sizes)

    assert run(module, test, processes=1) <= 4


def test_a_function_that_does_not_import_is_refused_by_name():
    async def test() -> None:
        await GraderPool([PoolFunction(target="no_such_module:f", options={})], 1).start()

    with pytest.raises(GraderImportError, match="no_such_module:f do not import on this node: ModuleNotFoundError"):
        asyncio.run(test())


def test_an_unknown_option_is_refused(module: str):
    async def test() -> None:
        await GraderPool([PoolFunction(target=f"{module}:right", options={"strict": True})], 1).start()

    with pytest.raises(GraderImportError, match="takes no option 'strict'"):
        asyncio.run(test())


async def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        await asyncio.sleep(0.02)
