"""The process behind a GraderPool: calls one grader after another and answers over a socket.

Started as `python -m tasks.rewards.grader_process FD CPU_SECONDS MEMORY_BYTES MODULE...`. It ends itself when its
parent goes away, also while a grader runs.
"""

import importlib
import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


def serve(connection: Connection, cpu_seconds: int) -> None:
    """Answer calls until the parent closes its end."""
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    connection.send("ready")
    while True:
        function, args, kwargs = calls.get()
        _allow_cpu(cpu_seconds)
        try:
            answer = ("returned", function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the parent is told what
            answer = ("raised", f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (TypeError, AttributeError, ValueError) as error:  # what it returned cannot be pickled
            connection.send(("raised", f"{type(error).__name__}: {error}"))


def _receive(connection: Connection, calls: "SimpleQueue[Any]") -> None:
    """Read calls in a thread of its own, so that a parent's death is seen while a grader runs."""
    while True:
        try:
            calls.put(connection.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        except Exception as error:  # noqa: BLE001 - a function that does not import here
            calls.put((_raise, (f"{type(error).__name__}: {error}",), {}))


def _raise(message: str) -> None:
    raise ImportError(f"the grader does not load in its process: {message}")


def _allow_cpu(seconds: int) -> None:
    """Let the kernel end this process when a call computes on inside C code, where no thread of ours gets a turn."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Import the modules first: their seconds are no part of a grader's time limit."""
    descriptor, cpu_seconds, memory_bytes, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(Connection(int(descriptor)), int(cpu_seconds))


if __name__ == "__main__":
    main()
