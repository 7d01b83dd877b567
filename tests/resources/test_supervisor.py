"""What the supervisor makes of what it hears: strangers change nothing, and the end of a process is told as it was."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resources.failures import Failure, GroupFacts, RankFacts
from resources.process_facts import host_identity
from resources.supervision import Supervisor
from tests.alone import alone

SECONDS = 20.0


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    one = Supervisor("127.0.0.1")
    yield one
    one.close()


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for a rank; it ends when it reads a line."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def watch(supervisor: Supervisor, pid: int, tmp_path: Path, host: str | None = None) -> list[Failure]:
    """Have a rank of this pid watched, on this machine unless another is named; what is told comes into the list."""
    rank = RankFacts(
        rank=0, actor_name="", actor_id="", node_ip="127.0.0.1", node_id="n", pid=pid, raylet_pid=os.getpid(),
        host=host or host_identity(), log_file=str(tmp_path / "log"),
    )  # fmt: skip
    told: list[Failure] = []
    facts = GroupFacts(
        run_id="r", name="echo", pool="main", roles=("echo",), incarnation=1, ranks=(rank,),
        supervisor=supervisor.address, token=supervisor.token, controller_host=host_identity(),
    )  # fmt: skip
    supervisor.watch(facts, told.append)
    return told


def say(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def answer(connection: socket.socket) -> bytes:
    """The next line of the answer; nothing when the connection was closed."""
    connection.settimeout(SECONDS)
    try:
        return connection.makefile("rb").readline()
    except ConnectionResetError:
        return b""


def greet(supervisor: Supervisor) -> socket.socket:
    """Connect as rank 0, and be answered."""
    connection = socket.create_connection(supervisor.address, timeout=SECONDS)
    say(connection, {"token": supervisor.token, "group": "echo", "incarnation": 1, "rank": 0})
    assert "now" in json.loads(answer(connection))
    return connection


def wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


@pytest.mark.parametrize(
    "line",
    [
        b'{"token": "\\u00e9"}',
        b'{"token": "\\ud800"}',
        b'{"token": 3}',
        b'{"token": null}',
        b'{"a":' + b"[" * 100_000,
        b"{",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe",
        b'{"a": "' + b"x" * 3_000_000,
    ],
    ids=["accent", "surrogate", "number", "null", "nested", "torn", "long number", "no text", "long line"],
)
def test_what_a_stranger_says_ends_its_own_connection_and_nothing_else(supervisor: Supervisor, line: bytes):
    rank = greet(supervisor)
    with socket.create_connection(supervisor.address, timeout=SECONDS) as stranger:
        with contextlib.suppress(ConnectionError):  # it may be closed before all of a long line was sent
            stranger.sendall(line + b"\n")
        assert answer(stranger) == b""
    with greet(supervisor), rank:
        rank.setblocking(False)
        with pytest.raises(BlockingIOError):
            rank.recv(1)


@pytest.mark.parametrize(
    "hello",
    [
        {"group": "echo", "incarnation": 1, "rank": 7},
        {"group": "echo", "incarnation": 1, "rank": "first"},
        {"group": "echo", "incarnation": 1},
        {"group": ["echo"], "incarnation": 1, "rank": 0},
        {"report": None},
        {"report": "{}"},
    ],
)
def test_a_message_that_makes_no_sense_ends_its_own_connection_and_nothing_else(
    supervisor: Supervisor, tmp_path: Path, hello: dict[str, Any]
):
    watch(supervisor, os.getpid(), tmp_path)
    with socket.create_connection(supervisor.address, timeout=SECONDS) as odd:
        say(odd, {"token": supervisor.token, **hello})
        assert answer(odd) == b""
    greet(supervisor).close()


def test_who_says_nothing_is_let_go(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resources.supervision._HELLO_SECONDS", 0.5)
    with greet(supervisor) as rank, socket.create_connection(supervisor.address, timeout=SECONDS) as silent:
        assert answer(silent) == b""
        rank.setblocking(False)
        with pytest.raises(BlockingIOError):
            rank.recv(1)


def _knock_without_a_free_descriptor() -> bytes:
    """How the answer begins once there is a descriptor again; none comes before, while this process is watched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(Supervisor("127.0.0.1")) as supervisor, socket.socket() as connection:
        watch(supervisor, os.getpid(), Path(tempfile.gettempdir()))
        beating = greet(supervisor)
        free = os.dup(connection.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            connection.connect(supervisor.address)
            say(connection, {"token": supervisor.token, "group": "echo", "incarnation": 1, "rank": 0})
            say(beating, {"tail": []})
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.settimeout(SECONDS)
        beating.close()
        return connection.recv(1)


def test_a_process_without_a_free_descriptor_lets_nobody_in_until_it_has_one():
    assert alone(_knock_without_a_free_descriptor) == b"{"


@pytest.mark.parametrize(
    ("last_word", "beats_since_kill", "kind", "detail"),
    [
        ({"exit": 3}, 0, "exit code", "exit code 3"),
        ({"signal": "SIGTERM"}, 0, "signal", "SIGTERM"),
        (None, 0, "out of memory", "killed for memory"),
        (None, 1, "out of memory", "killed for memory"),
        (None, 2, "signal", "SIGKILL (inferred: the process ended without a word)"),
    ],
)
def test_a_memory_kill_is_told_only_of_a_process_that_ends_without_a_word_right_after_it(
    supervisor: Supervisor,
    child: "subprocess.Popen[bytes]",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_word: dict[str, Any] | None,
    beats_since_kill: int,
    kind: str,
    detail: str,
):
    """The kernel's count may rise for a forked grader; a worker that goes on beating was not the one that was hit."""
    events = tmp_path / "memory.events"
    events.write_text("oom 0\noom_kill 0\n")
    monkeypatch.setattr("resources.process_facts._CGROUP_EVENTS", events)
    told = watch(supervisor, child.pid, tmp_path)
    with greet(supervisor) as rank:
        say(rank, {"running": "echo.before"})
        assert wait_until(lambda: supervisor.running("echo", 1)[0][0] == "echo.before")
        events.write_text("oom 1\noom_kill 1\n")
        for number in range(beats_since_kill):
            say(rank, {"running": f"echo.after-{number}"})
            assert wait_until(lambda number=number: supervisor.running("echo", 1)[0][0] == f"echo.after-{number}")
        if last_word is not None:
            say(rank, last_word)
            assert wait_until(lambda: supervisor.running("echo", 1)[0][0] is None)
        child.kill()
        assert wait_until(lambda: bool(told))
    assert (told[0].kind, told[0].detail) == (kind, detail)


def test_a_node_that_goes_without_closing_a_connection_is_lost_once_its_rank_is_silent_and_the_cluster_gives_it_up(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nodes = {"controller's", "n"}
    monkeypatch.setattr("resources.supervision._SUSPECT_SECONDS", 0.5)
    monkeypatch.setattr("resources.supervision._NODES_SECONDS", 0.1)
    monkeypatch.setattr("resources.supervision.alive_nodes", lambda: frozenset(nodes))
    monkeypatch.setattr("resources.supervision.is_node_alive", lambda node_id: node_id in nodes)
    monkeypatch.setattr(Supervisor, "_probe", lambda *_: None)  # a task there would never answer
    told = watch(supervisor, os.getpid(), tmp_path, host="elsewhere")
    with greet(supervisor):
        time.sleep(1.0)
        assert told == []  # silent, as a busy one may be
        nodes.clear()  # the cluster cannot be asked
        time.sleep(0.5)
        assert told == []
        nodes.add("controller's")
        assert wait_until(lambda: bool(told))
    assert (told[0].kind, told[0].detail) == ("node lost", "its node is gone")
