"""Watching a sandboxed program: its output, time and memory, and its end with everything it started."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_LOOK_SECONDS = 0.05
_END_SECONDS = 60.0
"""For what was killed to be gone: on a loaded machine dying takes its time, and needs no more than that."""
_MIB = 1 << 20

Ended = Literal["exit", "time", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one program may use."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    """Of each process, at most; all of them share one core."""
    memory_bytes: int = 512 * _MIB
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 32
    file_bytes: int = 16 * _MIB
    """Of the folder /box, where the program starts; /dev/shm has a MiB."""
    open_files: int = 64
    output_bytes: int = 64 * 1024


class Watched:
    """Reads a process's output and looks at its memory until it ends or is over a limit."""

    def __init__(self, process: subprocess.Popen[bytes], limits: SandboxLimits) -> None:
        self._process, self._limits = process, limits
        self._output = (bytearray(), bytearray())
        self._over_output = asyncio.Event()

    async def wait(self) -> Ended:
        end = time.monotonic() + self._limits.wall_seconds
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pipes = (self._process.stdout, self._process.stderr)
        readers = [
            asyncio.ensure_future(self._read(pipe.fileno(), out)) for pipe, out in zip(pipes, self._output, strict=True)
        ]
        try:
            while self._process.poll() is None:
                if self._over_output.is_set():
                    return "output"
                if time.monotonic() >= end:
                    return "time"
                if resident_bytes(self._process.pid) > self._limits.memory_bytes:
                    return "memory"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        _ended(self._process.pid), min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))
                    )
            await asyncio.wait_for(asyncio.gather(*readers), _END_SECONDS)
            return "output" if self._over_output.is_set() else "exit"
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for pipe in pipes:
                pipe.close()

    async def _read(self, descriptor: int, output: bytearray) -> None:
        os.set_blocking(descriptor, False)
        while True:
            await readable(descriptor)
            try:
                part = os.read(descriptor, 65536)
            except BlockingIOError:
                continue
            if not part:
                return
            output += part[: self._limits.output_bytes - len(output)]
            if len(output) >= self._limits.output_bytes:
                self._over_output.set()
                return

    def text(self, stream: int) -> str:
        return self._output[stream].decode("utf-8", errors="replace")


async def readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: future.done() or future.set_result(None))
    try:
        await future
    finally:
        loop.remove_reader(descriptor)


async def _ended(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants."""
    total, page, left = 0, os.sysconf("SC_PAGE_SIZE"), [pid]
    while left:
        one = left.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
            for thread in Path(f"/proc/{one}/task").iterdir():
                left += [int(child) for child in (thread / "children").read_text().split()]
    return total


async def end_box(process: subprocess.Popen[bytes], told: int) -> None:
    """End the box and wait until it is empty: its first process takes every other one with it."""
    await asyncio.wait_for(readable(told), _END_SECONDS)
    first = re.search(rb'"child-pid": *(\d+)', os.read(told, 4096))
    with contextlib.suppress(ProcessLookupError):
        if first is not None:
            box = os.pidfd_open(int(first[1]))
            try:
                signal.pidfd_send_signal(box, signal.SIGKILL)
                await asyncio.wait_for(readable(box), _END_SECONDS)
            finally:
                os.close(box)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(_ended(process.pid), _END_SECONDS)
    process.wait(timeout=1.0)
