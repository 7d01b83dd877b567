"""Graders in processes that can be killed: a time limit that holds against any grader, from any thread.

A signal-based limit works in the main thread only and a thread cannot be stopped; a process can.
"""

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tasks.rewards.score import Score, as_score

_START_SECONDS = 120.0
"""For a process to import its modules; sympy on a busy machine takes most of it."""
DEFAULT_MEMORY_BYTES = 4 << 30
"""Address space of a grader process; a grader that allocates more gets a MemoryError."""


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection


class GraderPool:
    """Up to `size` processes; each call runs in one of them and is over after `limit_seconds`, whatever it does.

    A call that runs over is killed with its process, and another process takes its place. Thread-safe.

    Args:
        modules: imported when a process starts; name the modules of the graders, or their import counts as grading.
    """

    def __init__(
        self,
        *,
        size: int,
        limit_seconds: float,
        modules: tuple[str, ...] = (),
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        if size < 1 or limit_seconds <= 0:
            raise ValueError(f"grader pool of size {size} and limit {limit_seconds} s; both must be positive")
        self.size = size
        self.limit_seconds = limit_seconds
        self._modules = modules
        self._memory_bytes = memory_bytes
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)  # a slot whose process is not started yet
        self._alive: set[_Worker] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def grade(
        self, function: Callable[..., object], *args: object, wait_seconds: float = 600.0, **kwargs: object
    ) -> Score:
        """Call an importable function in a process; what it returns is read as by `as_score`.

        Unscorable, with the reason, when it raises, returns nonsense, runs over the limit or takes its process down,
        and when no process came free within `wait_seconds`.
        """
        name = _name(function)
        try:
            worker = self._slots.get(timeout=wait_seconds)
        except queue.Empty:
            return Score(None, f"{name}: no grader process came free within {wait_seconds} s")
        try:
            worker = worker or self._start()
            answer = self._call(worker, function, args, kwargs)
        finally:
            self._slots.put(worker if worker and worker.process.poll() is None and not self._is_closed else None)
        if isinstance(answer, Score):
            return Score(None, f"{name}: {answer.reason}")
        kind, value = answer
        if kind == "raised":
            return Score(None, f"{name}: grader error: {value}")
        try:
            return as_score(value, name)
        except TypeError as error:
            return Score(None, f"grader error: {error}")

    def num_processes(self) -> int:
        """How many processes live now; at most `size`."""
        with self._lock:
            return sum(worker.process.poll() is None for worker in self._alive)

    def close(self) -> None:
        """End every process, also those in a call."""
        self._is_closed = True
        with self._lock:
            workers = list(self._alive)
        for worker in workers:
            self._kill(worker)

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        limits = [str(int(self.limit_seconds) + 2), str(self._memory_bytes)]  # CPU time as a second line of defence
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.rewards.grader_process", str(theirs.fileno()), *limits, *self._modules],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        worker = _Worker(process, ours)
        with self._lock:
            self._alive.add(worker)
        if not ours.poll(_START_SECONDS) or _receive(ours) != "ready":
            self._kill(worker)
            raise RuntimeError(f"a grader process did not start within {_START_SECONDS} s (exit {process.returncode})")
        return worker

    def _call(
        self, worker: _Worker, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[str, object] | Score:
        deadline = time.monotonic() + self.limit_seconds
        try:
            worker.connection.send((function, args, kwargs))
            has_answer = worker.connection.poll(max(0.0, deadline - time.monotonic()))
            answer = _receive(worker.connection) if has_answer else None
        except OSError:  # it died before it could read
            answer, has_answer = None, True
        if answer is not None:
            return answer
        self._kill(worker)
        if not has_answer:
            return Score(None, f"timeout after {self.limit_seconds} s")
        return Score(None, f"its process died (exit {worker.process.returncode})")

    def _kill(self, worker: _Worker) -> None:
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait(timeout=30)
        worker.connection.close()
        with self._lock:
            self._alive.discard(worker)


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _name(function: Callable[..., object]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}.{function.__qualname__}"
