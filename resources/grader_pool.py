"""A pool of grader processes with a wall-clock limit on every call; it is whole again after a hang or a death.

`processes` of them compute at a time. While calls wait and the busy ones are not computing (they sleep, or wait for a
service), up to 32 times as many are forked, and they go when the pool is idle: slow graders overlap, busy ones do not
fight over cores. All methods run on one asyncio loop.
"""

import asyncio
import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resources.grader_process import CONTROL_BYTES, LENGTH
from resources.graders import GraderFailedError
from resources.process_facts import cpu_seconds

WAITING_PER_PROCESS = 32
"""Processes that wait (rather than compute) at most, for each configured one."""
START_SECONDS = 120.0
OWN_ERROR = "grader error"
"""A function that caught its own failure says so in front of its reason."""
_LOOK_SECONDS = 0.02
_FORK_SECONDS = 20.0
_MAX_FAILED_FORKS = 5
_ATTEMPTS = 3
_MAX_ANSWER_BYTES = 1 << 24
_ROOT = Path(__file__).parent.parent


class GraderImportError(ValueError):
    """A grading function that this node cannot import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFunction:
    """A function of the pool: `module:name` and its fixed keyword arguments (JSON)."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """Imported beforehand, beside the function's own."""
    keywords: tuple[str, ...] = ()
    """What calls give it beyond a grader's arguments."""
    is_group_wise: bool = False
    """Whether a call is about all responses to a prompt."""


@dataclass(slots=True, eq=False)
class _Fork:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0
    cpu: float = 0.0
    """CPU seconds when last looked at."""

    async def receive(self) -> dict[str, Any]:
        size = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))[0]
        if size > _MAX_ANSWER_BYTES:
            raise GraderFailedError("nonsense", f"grader process {self.pid} answered {size} bytes")
        return json.loads(await self.reader.readexactly(size))

    async def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(message).encode()
        self.writer.write(LENGTH.pack(len(data)) + data)
        await self.writer.drain()
        return await self.receive()


class GraderPool:
    """Calls functions by their index in `functions`."""

    def __init__(self, functions: Sequence[PoolFunction], processes: int) -> None:
        self.functions = tuple(functions)
        self.processes = processes
        self.max_processes = processes * WAITING_PER_PROCESS
        self._idle: list[_Fork] = []
        self._busy: set[_Fork] = set()
        self._starting = 0
        self._waiting: collections.deque[asyncio.Future[_Fork]] = collections.deque()
        self._forker: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_growing = False
        self._failed_forks = 0

    @property
    def size(self) -> int:
        """Processes there are, those being started included."""
        return len(self._idle) + len(self._busy) + self._starting

    @property
    def is_waited_for(self) -> bool:
        """Whether calls wait for a process."""
        return bool(self._waiting)

    @property
    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return sorted(fork.pid for fork in (*self._idle, *self._busy))

    async def start(self) -> None:
        """Import the functions and start the processes.

        Raises GraderImportError naming the function, and OSError where this node starts no process.
        """
        async with self._lock:
            await self._start_forker()
        self._refill()

    async def call(self, function: int, arguments: Mapping[str, Any], timeout: float) -> tuple[Any, float]:
        """(answer, seconds). Raises GraderFailedError: timeout, or error for an exception or a death.

        A call whose process died because the forking process did (another grader may have killed it) is made again.
        """
        target = self.functions[function].target
        for attempt in range(_ATTEMPTS):
            fork = await self._take()
            forker, started = self._forker, time.monotonic()
            try:
                answer = await asyncio.wait_for(
                    fork.exchange({"function": function, "arguments": dict(arguments)}), timeout
                )
            except TimeoutError:
                self._discard(fork)
                text = f"{target} took longer than {timeout:g} s; its process was ended"
                raise GraderFailedError("timeout", text, time.monotonic() - started) from None
            except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
                self._discard(fork)
                is_forker_dead = forker is None or forker is not self._forker or forker.poll() is not None
                if is_forker_dead and attempt + 1 < _ATTEMPTS:
                    continue
                text = f"{target} ended its process ({type(error).__name__})"
                raise GraderFailedError("error", text, time.monotonic() - started) from None
            except (GraderFailedError, asyncio.CancelledError):
                self._discard(fork)
                raise
            seconds = time.monotonic() - started
            self._discard(fork) if answer.get("worn") else self._give_back(fork)
            if "error" in answer:
                raise GraderFailedError("error", f"{target} raised {answer['error']}", seconds)
            if answer.get("value") is None and answer.get("reason"):
                cause = "error" if answer["reason"].startswith(OWN_ERROR) else "nonsense"
                raise GraderFailedError(cause, f"{target}: {answer['reason']}", seconds)
            return answer.get("value"), seconds
        raise AssertionError("the last attempt returns or raises")

    def shrink(self) -> None:
        """End the processes beyond the configured number that have nothing to do."""
        while self.size > self.processes and self._idle:
            self._discard(self._idle.pop(), refill=False)

    async def close(self) -> None:
        """End every process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for fork in (*self._idle, *self._busy):
            fork.writer.close()
        self._idle.clear()
        self._busy.clear()
        self._stop_forker()
        await asyncio.sleep(0)  # lets the closed connections go before the loop does

    async def _take(self) -> _Fork:
        if self._idle:
            fork = self._idle.pop()
        else:
            future: asyncio.Future[_Fork] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._refill()
            self._watch_waiting()
            try:
                fork = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._give_back(future.result())
                raise
        self._busy.add(fork)
        return fork

    def _give_back(self, fork: _Fork) -> None:
        self._busy.discard(fork)
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(fork)
                return
        self._idle.append(fork)

    def _discard(self, fork: _Fork, *, refill: bool = True) -> None:
        self._busy.discard(fork)
        fork.writer.close()
        self._order({"kill": fork.pid})
        if refill:
            self._refill()

    def _refill(self) -> None:
        self._grow_to(self.processes)

    def _grow_to(self, size: int) -> None:
        for _ in range(min(size, self.max_processes) - self.size):
            self._starting += 1
            self._run(self._fork())

    def _run(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch_waiting(self) -> None:
        if not self._is_growing:
            self._is_growing = True
            self._run(self._grow())

    async def _grow(self) -> None:
        """While calls wait: if the busy processes leave cores unused, there may be more of them."""
        try:
            looked = time.monotonic()
            self._cpu_gained()
            while self._waiting:
                await asyncio.sleep(_LOOK_SECONDS)
                now = time.monotonic()
                computing = self._cpu_gained() / (now - looked)
                looked = now
                wanted = min(len(self._waiting), 3 * self.processes + 3 * len(self._busy))
                if not self._starting and computing < self.processes / 2 and len(self._busy) >= self.processes:
                    self._grow_to(self.size + wanted)
        finally:  # a node out of descriptors cannot look at its processes; the next call looks again
            self._is_growing = False

    def _cpu_gained(self) -> float:
        gained = 0.0
        for fork in self._busy:
            used = cpu_seconds(fork.pid) or fork.cpu
            gained += used - fork.cpu
            fork.cpu = used
        return gained

    async def _fork(self) -> None:
        ends: tuple[socket.socket, ...] = ()
        fork: _Fork | None = None
        is_up = False
        try:
            ours, theirs = ends = socket.socketpair()
            ours.setblocking(False)
            async with self._lock:
                if not self._order({}, theirs.fileno()):
                    await self._start_forker()
                    self._order({}, theirs.fileno())
            theirs.close()
            fork = _Fork(*await asyncio.open_unix_connection(sock=ours))
            fork.pid = (await asyncio.wait_for(fork.receive(), _FORK_SECONDS))["pid"]
            is_up = True
        except (OSError, asyncio.IncompleteReadError) as error:
            # The forker died in between, and the next one is made by a new forker; or this node is out of descriptors
            # or memory, which may pass.
            self._failed_forks += 1
            await asyncio.sleep(_LOOK_SECONDS)
            if self._failed_forks > _MAX_FAILED_FORKS:
                self._fail_waiting(f"no grader process starts any more ({type(error).__name__}: {error})")
        except GraderImportError as error:
            self._fail_waiting(str(error))
        finally:
            self._starting -= 1
            for end in ends[1:] if fork is not None else ends:
                end.close()
            if fork is not None and not is_up:
                fork.writer.close()
        if fork is not None and is_up:
            self._failed_forks = 0
            self._give_back(fork)
        elif self._waiting:
            self._refill()

    def _fail_waiting(self, text: str) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(GraderFailedError("error", text))

    def _order(self, order: Mapping[str, int], descriptor: int | None = None) -> bool:
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], [] if descriptor is None else [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def _start_forker(self) -> None:
        self._stop_forker()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_SECONDS)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        answer: dict[str, Any] = {"error": "its start was given up"}
        try:
            with theirs:
                self._forker = subprocess.Popen(
                    [sys.executable, "-m", "resources.grader_process", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            setup = {"path": sys.path, "functions": [asdict(function) for function in self.functions]}
            ours.send(json.dumps(setup).encode())
            reply = await asyncio.get_running_loop().run_in_executor(None, ours.recv, CONTROL_BYTES)
            answer = json.loads(reply or b'{"error": "its process ended"}')
        except TimeoutError:
            answer = {"error": f"no answer within {START_SECONDS:g} s"}
        finally:
            if "error" in answer:
                ours.close()
                self._stop_forker()
        if "error" in answer:
            names = ", ".join(function.target for function in self.functions)
            raise GraderImportError(f"graders {names} do not import on this node: {answer['error']}")
        self._control = ours

    def _stop_forker(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._forker is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forker.wait(timeout=5.0)
            if self._forker.poll() is None:
                self._forker.kill()
                self._forker.wait()
            self._forker = None


async def check_functions(functions: Sequence[PoolFunction]) -> None:
    """Import the functions as a pool would, in a process of their own. Raises GraderImportError."""
    pool = GraderPool(functions, 1)
    try:
        await pool.start()
    finally:
        await pool.close()
