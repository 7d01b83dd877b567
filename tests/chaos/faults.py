"""Faults from outside: a thread that watches a run as any observer can, and sends signals to its processes.

It looks at the controller's submitted steps (a step runs when everything before it has ended and it has not), at pids
that Ray and the worker groups know, and at /proc. The product has no hook for it.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from resources.process_facts import descendants
from tasks.session import _CURRENT, Session

POLL_SECONDS = 0.003
REPLACED_QUIETLY = ("grader", "writer")
"""Processes whose loss is no fault of the run."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Send `number` to `target` in `iteration` while `step` runs (`None`: as soon as the iteration has begun)."""

    iteration: int
    target: str
    """A duty (`actor`, `rollout`, ...), `host POOL`, `grader`, `writer`, or `everything` but the controller."""
    step: str | None = None
    number: signal.Signals = signal.SIGKILL
    rank: int = 0


@dataclass(kw_only=True)
class Done:
    """A fault that was made."""

    fault: Fault
    pid: int
    at: float
    iteration: int
    running: tuple[str, ...]
    """Steps that ran at that moment."""


@dataclass(kw_only=True)
class Injector:
    """Makes each fault once, the next when the one before is noticed; use as a context manager around the flow.

    A moment that was over before it was seen is waited for again in the next iteration.
    """

    faults: Sequence[Fault]
    made: list[Done] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = sorted(self.faults, key=lambda fault: fault.iteration)
        self._recoveries = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault-injector", daemon=True)

    def __enter__(self) -> "Injector":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    @property
    def left(self) -> list[Fault]:
        """Faults whose moment did not come."""
        return list(self._left)

    @property
    def late(self) -> list[Done]:
        """Faults that were made in a later iteration than was wanted."""
        return [done for done in self.made if done.iteration > done.fault.iteration]

    def _watch(self) -> None:
        while self._left and not self._over.wait(POLL_SECONDS):
            if not _CURRENT or not ray.is_initialized():
                continue
            run = _CURRENT[-1]
            if run.snapshot is None or run.recoveries < self._recoveries:
                continue
            due = [fault for fault in self._left if fault.iteration <= run.state.iteration]
            running = running_steps(run) if due else ()
            for fault in due:
                is_time = fault.step in running if fault.step is not None else bool(running)
                if is_time and self._make(run, fault, running):
                    break

    def _make(self, run: Session, fault: Fault, running: tuple[str, ...]) -> bool:
        pids = pids_of(run, fault)
        if not pids:
            return False
        for pid in pids:
            os.kill(pid, fault.number)
        done = Done(fault=fault, pid=pids[0], at=time.monotonic(), iteration=run.state.iteration, running=running)
        self.made.append(done)
        self._left.remove(fault)
        if fault.target not in REPLACED_QUIETLY:
            self._recoveries = run.recoveries + 1
        return True


def running_steps(run: Session) -> tuple[str, ...]:
    """Steps of the present subflow whose inputs are there and that have not ended."""
    found = []
    for future in list(run.inflight):
        refs = [future.wrapped_future, *(one.wrapped_future for one in future._submission.upstream)]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        if future.wrapped_future not in done and len(done) == len(refs) - 1:
            found.append(future.task_name)
    return tuple(found)


def pids_of(run: Session, fault: Fault) -> list[int]:
    """The processes a fault is meant for; none while they are being rebuilt."""
    if fault.target != "everything":
        pid = pid_of(run, fault)
        return [] if pid is None else [pid]
    hosts = [_actor_pid(host) for host in run.hosts._hosts.values()]
    workers = {rank["pid"] for group in run.groups.values() for rank in group.ranks}
    return [pid for pid in (*hosts, *sorted(workers)) if pid]


def pid_of(run: Session, fault: Fault) -> int | None:
    """The process a fault is meant for; None while it is being rebuilt."""
    kind, _, pool = fault.target.partition(" ")
    if kind == "host":
        return _actor_pid(run.hosts._hosts.get(pool))
    if kind == "writer":
        return _actor_pid(next(iter(run.writers.handles.values()), None))
    if kind == "grader":
        children = sorted(descendants([run.groups["reward"].ranks[0]["pid"]]))
        return children[0] if children else None
    ranks = run.groups[fault.target].ranks
    return ranks[fault.rank % len(ranks)]["pid"] or None


def _actor_pid(actor: Any) -> int | None:
    if actor is None:
        return None
    try:
        facts: Any = ray.get(actor.facts.remote(), timeout=10.0)
        return int(facts["pid"])
    except (RayError, GetTimeoutError):
        return None
