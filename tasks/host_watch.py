"""Notices a task host or a snapshot writer that is stopped: Ray knows of dead ones, a frozen one would hold the run.

One that answers no question and gains no CPU time for `stopped_after_seconds` is ended; its steps (or its save) then
fail like those of a dead one, and it is replaced.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from resources.process_facts import cpu_seconds
from resources.snapshot_writer import SnapshotWriters
from tasks.hosts import HostLostError, HostSet

LOOK_SECONDS = 1.0
REMOTE_FACTOR = 3.0
"""On another machine CPU time is not seen from here, so silence has to last longer."""
_CPU_STEP_SECONDS = 0.011


@dataclass(kw_only=True)
class _Watched:
    handle: Any
    pid: int | None = None
    is_local: bool = False
    asked: Any = None
    answered: float = 0.0
    cpu: float | None = None
    cpu_since: float = 0.0


class HostWatch:
    """Asks every host and writer once a second, from a thread of its own. A context manager."""

    def __init__(self, hosts: HostSet, writers: SnapshotWriters, stopped_after_seconds: float) -> None:
        self._hosts = hosts
        self._writers = writers
        self._limit = stopped_after_seconds
        self._watched: dict[str, _Watched] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="host-watch", daemon=True)

    def __enter__(self) -> "HostWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS) and ray.is_initialized():
            for pool in self._hosts.pools:
                with contextlib.suppress(HostLostError):  # it is being replaced
                    self._look_at(f"host {pool}", self._hosts.host_of(pool))
            for node_id, writer in self._writers.handles.items():
                self._look_at(f"writer {node_id}", writer)

    def _look_at(self, name: str, handle: Any) -> None:
        try:
            self._check(self._state_of(name, handle))
        except ray.exceptions.RayError:
            self._watched.pop(name, None)  # dead; its steps, or its save, tell the controller

    def _state_of(self, name: str, handle: Any) -> _Watched:
        state = self._watched.get(name)
        if state is None or state.handle is not handle:
            state = self._watched[name] = _Watched(handle=handle, asked=handle.facts.remote())
        return state

    def _check(self, state: _Watched) -> None:
        now = time.monotonic()
        if ray.wait([state.asked], timeout=0)[0]:
            answer: Any = ray.get(state.asked)
            if state.pid is None:
                state.pid, state.is_local = int(answer["pid"]), answer["node"] == ray.util.get_node_ip_address()
            state.answered, state.cpu, state.cpu_since = now, None, now
            state.asked = state.handle.clock.remote()
            return
        if state.pid is None or now - state.answered < self._limit / 2:
            return  # it still starts, or was heard of lately
        if state.is_local:
            cpu = cpu_seconds(state.pid)
            if cpu is not None and (state.cpu is None or cpu - state.cpu > _CPU_STEP_SECONDS):
                state.cpu, state.cpu_since = cpu, now
        silent = min(now - state.answered, now - state.cpu_since)
        if silent >= (self._limit if state.is_local else REMOTE_FACTOR * self._limit):
            ray.kill(state.handle)
            state.answered = state.cpu_since = now
