"""A program that nobody trusts, run under limits: bubblewrap with everything unshared, rlimits, a system call filter.

The box has no network, no other process, no file of the host but a read-only /usr and its Python, two small writable
folders in memory, one core, and no way to make a namespace. What is over a limit ends with everything it started.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resources.sandbox_filter import seccomp_program
from resources.sandbox_watch import Ended, SandboxLimits, Watched, end_box

MIN_BWRAP = (0, 8)
"""The first with --disable-userns."""
_FIRST_UID = 1_000_000_000
"""Under root every box gets a user of its own above this: the kernel does not hold root to limits on processes."""
_MIB = 1 << 20


class SandboxUnavailableError(RuntimeError):
    """This node cannot run untrusted programs safely: why, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python program and its standard input."""

    source: str
    stdin: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a program ended."""

    ended: Ended
    exit_code: int
    """Negative for a signal; meaningful for `exit`."""
    stdout: str
    stderr: str
    seconds: float


class Sandbox:
    """Runs programs, `slots` at a time; use it on one asyncio loop."""

    def __init__(self, limits: SandboxLimits, slots: int, *, is_unsafe: bool = False) -> None:
        """`is_unsafe`: without bubblewrap, under rlimits and a time limit alone: for code you trust.

        Raises SandboxUnavailableError when this node cannot make a box.
        """
        self.limits = limits
        self.slots = slots
        self.is_unsafe = is_unsafe
        self._free = list(range(slots))
        self._turn = asyncio.Semaphore(slots)
        self._python = Path(sys.executable)
        if not is_unsafe:
            self._bwrap = find_bwrap()
            self._python = find_python()
            _check_box(self)

    async def run(self, program: Program) -> Finished:
        """Run a program to its end or to a limit. Raises SandboxUnavailableError when the box itself fails."""
        async with self._turn:
            slot = self._free.pop()
            try:
                return await self._run(program, slot)
            finally:
                self._free.append(slot)

    async def _run(self, program: Program, slot: int) -> Finished:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_sealed("main.py", program.source))
            stdin = stack.enter_context(_sealed("stdin", program.stdin))
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if self.is_unsafe else None
            filters = stack.enter_context(_sealed("filter", seccomp_program()))
            told, tells = os.pipe()
            stack.callback(os.close, told)
            started = time.monotonic()
            try:
                with _on_one_core(slot):
                    process = subprocess.Popen(
                        self._command(source, filters, tells),
                        stdin=stdin,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        pass_fds=(source,) if self.is_unsafe else (source, filters, tells),
                        cwd=folder or "/",
                        env={},
                        start_new_session=True,
                        **self._user(slot),
                    )
            finally:
                os.close(tells)
            try:
                watched = Watched(process, self.limits)  # pyright: ignore[reportArgumentType]
                ended = await watched.wait()
            finally:
                await end_box(process, told)  # pyright: ignore[reportArgumentType]
            return Finished(
                ended=ended,
                exit_code=process.returncode,
                stdout=watched.text(0),
                stderr=watched.text(1),
                seconds=time.monotonic() - started,
            )

    def _user(self, slot: int) -> dict[str, Any]:
        """Under root: a user that owns nothing."""
        if os.geteuid() != 0 or self.is_unsafe:
            return {}
        uid = _FIRST_UID + os.getpid() % 1_000_000 * 64 + slot % 64
        return {"user": uid, "group": uid, "extra_groups": []}

    def _command(self, source: int, filters: int, tells: int) -> list[str]:
        python = [str(self._python), "-S", "-s", "-B", "-P", "-X", "utf8", "-c", _PRELUDE]
        limits = asdict(self.limits)
        if self.is_unsafe:
            return [*python, json.dumps({**limits, "processes": 0}), f"/proc/self/fd/{source}"]
        return [
            self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
            "--hostname", "box", "--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
            "--setenv", "HOME", "/box", "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONHASHSEED", "0",
            *_read_only_binds(self._python),
            "--proc", "/proc", "--dev", "/dev", "--size", str(_MIB), "--tmpfs", "/dev/shm",
            "--size", str(self.limits.file_bytes), "--tmpfs", "/box", "--chdir", "/box",
            "--ro-bind-data", str(source), "/main.py", "--remount-ro", "/dev", "--remount-ro", "/",
            "--seccomp", str(filters), "--info-fd", str(tells), "--", *python, json.dumps(limits), "/main.py",
        ]  # fmt: skip


_PRELUDE = """
import json, os, resource, runpy, sys
limits, path = json.loads(sys.argv[1]), sys.argv[2]
os.nice(10)
for name, amount in (("CPU", limits["cpu_seconds"]), ("AS", limits["memory_bytes"]), ("FSIZE", limits["file_bytes"]),
                     ("NOFILE", limits["open_files"]), ("NPROC", limits["processes"]), ("CORE", 0), ("MSGQUEUE", 0),
                     ("MEMLOCK", 0)):
    if amount or name not in ("NPROC",):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name, resource.RLIMIT_CORE), (amount, amount))
del limits
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""
"""First thing in the box. Limits are hard, so what follows cannot raise them; nothing here is worth hiding."""


@contextlib.contextmanager
def _sealed(name: str, content: str | bytes) -> Iterator[int]:
    """A file in memory that nobody can change any more; at its beginning."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _on_one_core(slot: int) -> Iterator[None]:
    """What this thread starts inside runs on one core, which the filter does not let it leave."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[slot % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _read_only_binds(python: Path) -> list[str]:
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            binds += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            binds += ["--ro-bind", name, name]
    prefix = python.parent.parent
    return binds if prefix.is_relative_to("/usr") else [*binds, "--ro-bind", str(prefix), str(prefix)]


def find_bwrap() -> str:
    """Path of bubblewrap. Raises SandboxUnavailableError when it is missing or too old."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailableError(
            "bubblewrap (bwrap) is not installed on this node; install the package `bubblewrap`, or set the grader's"
            " sandbox: unsafe if you trust the code that is graded"
        )
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", told)[:2])
    if version < MIN_BWRAP:
        raise SandboxUnavailableError(f"bubblewrap here is {told.strip() or 'unknown'}; version 0.8 or newer is needed")
    return found


def find_python() -> Path:
    """An interpreter that the box's user may read: our own, or the system's when ours lies in a private folder."""
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [own, *(Path(path) for path in (shutil.which("python3", path="/usr/bin:/bin"),) if path)]
    for candidate in candidates:
        if candidate.exists() and (os.geteuid() != 0 or _is_open_to_all(candidate.resolve())):
            return candidate.resolve()
    raise SandboxUnavailableError(
        f"none of {[str(path) for path in candidates]} can be read by the sandbox's unprivileged user; install python3"
    )


def _is_open_to_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


def _check_box(sandbox: Sandbox) -> None:
    """Make a box once: user namespaces may be forbidden here."""
    finished = asyncio.run(sandbox.run(Program(source="print('in the box')")))
    if finished.stdout.strip() != "in the box":
        raise SandboxUnavailableError(
            f"bubblewrap cannot make a sandbox here ({(finished.stderr or finished.ended).strip()[:300]}); user"
            " namespaces may be forbidden (in a container: allow unprivileged user namespaces), or set the grader's"
            " sandbox: unsafe"
        )
    sandbox._turn = asyncio.Semaphore(sandbox.slots)
