"""Processes that run a user's grading functions, started with `python -m resources.grader_process FD`.

The first process imports the functions once and then only forks; each fork answers one call at a time on its own
socket. It imports the standard library alone: it is neither a fork of a Ray process nor does it load torch. Descendants
that outlive their fork are adopted and ended here, so a grader that daemonises leaves nothing behind.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import importlib
import inspect
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("<I")
"""Every message to and from a fork is JSON behind its length."""
MAX_LEAKED_THREADS = 16
"""A fork that a grader left with more threads than this is replaced."""
CONTROL_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SWEEP_SECONDS = 1.0

PROMPT_KEYWORDS = ("prompt", "answer", "extra", "source", "index")
ROW_KEYWORDS = (*PROMPT_KEYWORDS, "response", "finish_reason", "response_length")
GROUP_KEYWORDS = (*PROMPT_KEYWORDS, "responses", "extras", "finish_reasons", "response_lengths")
"""What a grading function may ask for: of one response, or of all responses to a prompt at once."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Function = Callable[..., Any]


def main(descriptor: int) -> None:
    """Serve the pool at the other end of `descriptor` until it closes."""
    control = socket.socket(fileno=descriptor)
    setup = json.loads(control.recv(CONTROL_BYTES))
    sys.path[:] = setup["path"]
    try:
        for module in (name for entry in setup["functions"] for name in entry["modules"]):
            importlib.import_module(module)
        functions = [
            load_function(entry["target"], entry["options"], entry["keywords"], is_group_wise=entry["is_group_wise"])
            for entry in setup["functions"]
        ]
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(b'{"ready": true}')
    _Forker(control, functions).run()


def load_function(
    target: str, options: Mapping[str, Any], keywords: Sequence[str] = (), *, is_group_wise: bool = False
) -> Function:
    """The function at `module:name`, taking only those keywords it knows, `options` filled in.

    `keywords`: what calls give beyond ROW_KEYWORDS, or GROUP_KEYWORDS where they are about a whole group.

    Raises ImportError, ValueError or TypeError naming what is wrong.
    """
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"module {module!r} has no function {name!r}")
    parameters = inspect.signature(found).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = sorted(set(options) - set(parameters))
    if unknown and not takes_all:
        raise TypeError(f"{target} takes no option {unknown[0]!r}; it takes {sorted(parameters)}")
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _VARIADIC]
    given = {*(GROUP_KEYWORDS if is_group_wise else ROW_KEYWORDS), *keywords}
    unmet = sorted(set(needed) - set(options) - given)
    if unmet:
        other = set(unmet) & {*ROW_KEYWORDS, *GROUP_KEYWORDS}
        hint = f"; it gets {sorted(other)[0]!r} with is_group_wise: {str(not is_group_wise).lower()}" if other else ""
        raise TypeError(f"{target} needs {unmet[0]!r}, which is no option given; it may ask for {sorted(given)}{hint}")

    def call(arguments: dict[str, Any]) -> Any:
        given = {**arguments, **options}
        return found(**(given if takes_all else {key: value for key, value in given.items() if key in parameters}))

    return call


class _Forker:
    def __init__(self, control: socket.socket, functions: list[Function]) -> None:
        self._control = control
        self._functions = functions
        self._forks: set[int] = set()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._control, self._wake], [], [], _SWEEP_SECONDS)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._reap()
            if self._control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, CONTROL_BYTES, 1)
                if not message:
                    self._end()
                self._obey(json.loads(message), descriptors)

    def _obey(self, order: dict[str, int], descriptors: list[int]) -> None:
        if "kill" in order:
            if order["kill"] in self._forks:
                _kill_group(order["kill"])
            return
        forker, pid = os.getpid(), os.fork()
        if pid == 0:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != forker:  # it died before it could be watched
                os._exit(0)
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
            self._control.close()
            _serve(socket.socket(fileno=descriptors[0]), self._functions)
        os.close(descriptors[0])
        self._forks.add(pid)

    def _reap(self) -> None:
        """Collect the dead; what a dead fork left in its process group, and what left the group, dies with it."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if dead.si_pid in self._forks:
                    _kill_group(dead.si_pid)
                    self._forks.discard(dead.si_pid)
                os.waitpid(dead.si_pid, 0)
        for pid in _children() - self._forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> NoReturn:
        for pid in self._forks:
            _kill_group(pid)
        self._forks.clear()
        while _children():
            self._reap()
            select.select([self._wake], [], [], 0.01)
        os._exit(0)


def _children() -> set[int]:
    me = os.getpid()
    return {int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()}


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # forked a moment ago: not yet the leader of its group
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _serve(peer: socket.socket, functions: list[Function]) -> NoReturn:
    """In a fork: answer calls until the pool closes the socket."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # What a grader prints goes to the worker's log, what it reads is empty.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _send(peer, {"pid": os.getpid()})
    while True:
        call = _receive(peer)
        if call is None:
            os._exit(0)
        answer = _answer(functions[call["function"]], call["arguments"])
        is_worn = threading.active_count() > 1 + MAX_LEAKED_THREADS
        _send(peer, {**answer, "worn": is_worn})
        if is_worn:
            os._exit(0)


def _answer(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"value": plain(value), "reason": reason_of(value)}
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, SystemExit too
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def plain(value: Any) -> Any:
    """A grader's answer as JSON: numbers and lists of them; arrays and tensors become lists, the rest its text."""
    if isinstance(value, dict) and "score" in value:
        return plain(value["score"])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value).get("value", repr(value)))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return plain(to_list())
    return f"a {type(value).__name__}: {value!r:.100}"


def reason_of(value: Any) -> str:
    """Why there is no score, where a grader says so: the `reason` beside the `value` of a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return str(dataclasses.asdict(value).get("reason", ""))[:500]
    return ""


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    peer.sendall(LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> dict[str, Any] | None:
    head = _read(peer, LENGTH.size)
    body = None if head is None else _read(peer, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read(peer: socket.socket, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        part = peer.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return parts


if __name__ == "__main__":
    main(int(sys.argv[1]))
