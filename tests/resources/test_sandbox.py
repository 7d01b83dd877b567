"""The sandbox: ordinary programs run, hostile ones end within their limits and change nothing outside."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from resources.process_facts import is_running
from resources.sandbox import Finished, Program, Sandbox, SandboxLimits, SandboxUnavailableError
from resources.sandbox_filter import seccomp_program
from tests.sandbox_here import why_no_sandbox

REASON = why_no_sandbox()
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")
LIMITS = SandboxLimits(
    wall_seconds=2.0, cpu_seconds=1, memory_bytes=256 << 20, processes=24, file_bytes=4 << 20, output_bytes=16384
)
HOSTILE_LIMITS = replace(LIMITS, wall_seconds=1.0)
NEIGHBOUR_LIMITS = replace(LIMITS, wall_seconds=60.0)
"""Its CPU time stays limited; its wall time is long, since tests also run on machines that are busy otherwise."""
REPEATS = 25
GOOD = "total = 0\nfor number in range(200_000): total += number\nprint(total)"
GOOD_OUTPUT = "19999900000"

_PROGRAMS = (Path(__file__).parent / "hostile_programs.txt").read_text().split("### ")[1:]
HOSTILE: dict[str, str] = {text.partition("\n")[0]: text.partition("\n")[2] for text in _PROGRAMS}
assert len(HOSTILE) >= 40, "as many as are promised"


@dataclass(frozen=True)
class Outside:
    """Things of the host that no program may reach."""

    folder: Path
    port: socket.socket
    abstract: socket.socket
    canary: subprocess.Popen[bytes]

    def names(self) -> str:
        """Told to the program: hiding them is not what protects them."""
        told = {
            "WITNESS": str(self.folder),
            "PORT": self.port.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname()[1:].decode(),
            "CANARY": self.canary.pid,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in told.items())

    def check(self, name: str) -> None:
        assert [path.name for path in self.folder.iterdir()] == ["witness"], name
        assert (self.folder / "witness").read_text() == "untouched", name
        assert is_running(self.canary.pid), name
        for listener in (self.port, self.abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert boxed_processes() == [], name


def boxed_processes() -> list[int]:
    """Processes on the host that belong to a user of one of this process's boxes."""
    found, first = [], 1_000_000_000 + os.getpid() % 1_000_000 * 64
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.geteuid() == 0:
            try:
                owner = entry.stat().st_uid
            except FileNotFoundError:
                continue
            if first <= owner < first + 64 and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    folder = tmp_path / "outside"
    folder.mkdir(mode=0o777)
    (folder / "witness").write_text("untouched")
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as abstract:
        port.bind(("127.0.0.1", 0))
        abstract.bind(f"\0callsheet-{os.getpid()}")
        for listener in (port, abstract):
            listener.listen()
            listener.setblocking(False)
        canary = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(60)"])
        yield Outside(folder, port, abstract, canary)
        canary.kill()
        canary.wait()


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS, 2)


def run(sandbox: Sandbox, *sources: str, stdin: str = "") -> list[Finished]:
    async def body() -> list[Finished]:
        return await asyncio.gather(*(sandbox.run(Program(source=source, stdin=stdin)) for source in sources))

    return asyncio.run(body())


def attack(outside: Outside, names: Sequence[str]) -> None:
    """Run each hostile program beside a good one, which must not notice."""
    hostile, neighbour = Sandbox(HOSTILE_LIMITS, 1), Sandbox(NEIGHBOUR_LIMITS, 1)

    async def both(source: str) -> tuple[Finished, Finished]:
        return await asyncio.gather(hostile.run(Program(source=source)), neighbour.run(Program(source=GOOD)))

    for name in names:
        bad, good = asyncio.run(both(outside.names() + HOSTILE[name]))
        assert "ESCAPED" not in bad.stdout, name
        assert len(bad.stdout) <= LIMITS.output_bytes, name
        assert (good.ended, good.stdout.strip()) == ("exit", GOOD_OUTPUT), name
        outside.check(name)


@needs_sandbox
def test_a_program_reads_its_input_and_its_output_comes_back(sandbox: Sandbox):
    [finished] = run(sandbox, "print(int(input()) + int(input()))", stdin="1\n2\n")
    assert (finished.ended, finished.exit_code, finished.stdout) == ("exit", 0, "3\n")


@needs_sandbox
def test_an_exception_is_an_exit_with_its_trace(sandbox: Sandbox):
    [finished] = run(sandbox, "raise ValueError('why')")
    assert (finished.ended, finished.exit_code) == ("exit", 1)
    assert finished.stderr.endswith("ValueError: why\n")


@needs_sandbox
@pytest.mark.parametrize(
    ("name", "ended"), [("sleep_forever", "time"), ("endless_output", "output"), ("endless_errors", "output")]
)
def test_each_limit_says_how_the_program_ended(sandbox: Sandbox, name: str, ended: str):
    assert run(sandbox, HOSTILE[name])[0].ended == ended


@needs_sandbox
def test_memory_counts_over_all_processes(sandbox: Sandbox):
    source = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: break\n"
        "kept = bytearray(b'x') * (60 << 20)\ntime.sleep(60)"
    )
    assert run(sandbox, source)[0].ended == "memory"


@needs_sandbox
def test_the_box_holds_its_program_and_nothing_of_the_host(sandbox: Sandbox):
    source = "import os\nprint(sorted(set(os.listdir('/')) - {'lib32', 'lib64', 'libx32', 'sbin'}), os.listdir('/box'))"
    [finished] = run(sandbox, source)
    assert finished.stdout.startswith("['bin', 'box', 'dev', 'lib', 'main.py', 'proc', 'usr'] []")


@needs_sandbox
def test_no_descriptor_of_the_worker_reaches_the_box(sandbox: Sandbox):
    [finished] = run(sandbox, "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])")
    assert finished.stdout == "[0, 1, 2]\n"


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_hostile_program_escapes_or_disturbs_its_neighbour(outside: Outside):
    attack(outside, list(HOSTILE))


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hostile_programs_fail_every_time(outside: Outside):
    for _ in range(REPEATS):
        attack(outside, list(HOSTILE))


def test_a_missing_bubblewrap_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match=r"bwrap\) is not installed on this node; .* sandbox: unsafe"):
        Sandbox(LIMITS, 1)


def test_unsafe_runs_without_bubblewrap_under_a_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    good, bad = run(Sandbox(LIMITS, 2, is_unsafe=True), "print(40 + 2)", "import time\ntime.sleep(60)")
    assert (good.ended, good.stdout) == ("exit", "42\n")
    assert bad.ended == "time"


def test_a_program_that_cannot_be_started_leaves_no_file_open():
    box = Sandbox(LIMITS, 1, is_unsafe=True)
    box._python = Path("/nowhere/python")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        asyncio.run(box.run(Program(source="print(1)")))
    assert os.listdir("/proc/self/fd") == before


def test_the_filter_is_made_of_whole_instructions_and_unknown_machines_are_refused():
    assert len(seccomp_program("x86_64")) % 8 == 0
    assert len(seccomp_program("aarch64")) % 8 == 0
    with pytest.raises(ValueError, match="no system call table for 'riscv64'"):
        seccomp_program("riscv64")
