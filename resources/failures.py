"""What is known of a worker that failed, and the one error that carries it to the user."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LOG_TAIL_LINES = 50

DEATHS = ("exit code", "signal", "out of memory", "node lost", "stopped")
"""Failure kinds that are an end of the process, as against an exception or a missed deadline."""

_FAULTS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_NODE_LOST = re.compile(
    r"node (has died|was terminated|failed|is dead)|its node|NODE_DIED|where the actor was running", re.I
)
_OUT_OF_MEMORY = re.compile(
    r"low on memory|OutOfMemory|out of memory: killed|due to memory pressure|memory usage threshold", re.I
)


class RankError(Exception):
    """An exception inside a worker, as text: it can always be pickled and read, whatever class was raised."""

    def __init__(self, type_name: str, text: str, trace: str, raised_at: float) -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.trace = trace
        self.raised_at = raised_at

    def __reduce__(self) -> tuple[type["RankError"], tuple[Any, ...]]:
        return (RankError, (self.type_name, self.text, self.trace, self.raised_at))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first failure of a worker group."""

    kind: str
    """exception | exit code | signal | out of memory | node lost | stopped | deadline | stale"""
    detail: str
    """One line: the exception's type and text, "exit code 3", "SIGKILL (inferred: ...)", ..."""
    role: str
    group: str
    pool: str
    rank: int
    world_size: int
    node_ip: str
    node_id: str
    pid: int
    incarnation: int
    method: str | None = None
    exception_type: str | None = None
    trace: str | None = None
    log_file: str | None = None
    log_tail: tuple[str, ...] = ()
    raised_at: float = 0.0
    pending: tuple[str, ...] = ()
    """Ranks that had not answered, for a deadline."""

    @property
    def is_death(self) -> bool:
        """Whether a process ended (or stopped), so that the group has to be rebuilt."""
        return self.kind in DEATHS

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "log_tail": tuple(fields["log_tail"]), "pending": tuple(fields["pending"])})

    def with_tail(self, lines: Sequence[str]) -> "Failure":
        """The same failure with the last lines of the worker's log."""
        return replace(self, log_tail=tuple(lines[-LOG_TAIL_LINES:]))

    def describe(self) -> str:
        """The whole story, most important first."""
        call = f" in {self.role}.{self.method}" if self.method else ""
        text = [
            f"{self.role} rank {self.rank} of {self.world_size} failed{call}: {self.kind}: {self.detail}",
            f"  role {self.role} · pool {self.pool} · rank {self.rank} · node {self.node_ip} ({self.node_id[:12]}) "
            f"· pid {self.pid} · group {self.group} · incarnation {self.incarnation}",
        ]
        if self.pending:
            text.append(f"  not answered: {', '.join(self.pending)}")
        if self.trace:
            text += ["  traceback in the worker:", *(f"    {line}" for line in self.trace.rstrip().splitlines())]
        if self.log_tail:
            text += [
                f"  last {len(self.log_tail)} lines of {self.log_file}:",
                *(f"    {line}" for line in self.log_tail),
            ]
        elif self.log_file:
            text.append(f"  its log {self.log_file} is empty")
        return "\n".join(text)


class WorkerFailed(RuntimeError):  # noqa: N818 - it says what happened, as CallTimeout does
    """A worker of a group failed. Says role, rank, pool, node, pid and kind first; `failure` holds them as fields."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.describe())
        self.failure = failure

    def __reduce__(self) -> tuple[type["WorkerFailed"], tuple[Failure]]:
        return (type(self), (self.failure,))


class CallTimeout(WorkerFailed, TimeoutError):  # noqa: N818
    """A call that was not answered by its deadline; the ranks that had not answered are named."""


class StaleGroup(WorkerFailed):
    """A call through a handle of an earlier incarnation of the group."""


def death_kind(
    error_text: str, exit_code: int | None, signal_name: str | None, log_tail: Sequence[str], is_oom: bool
) -> tuple[str, str]:
    """(kind, detail) of a process that ended, from what it announced, what Ray says and what stands in its log.

    A process can announce an exit code or a catchable signal; nothing but SIGKILL ends it without a word, and only
    then do the kernel's memory kills (`is_oom`) say anything: they may have hit another process.
    """
    if _NODE_LOST.search(error_text):
        return "node lost", "its node is gone"
    if _OUT_OF_MEMORY.search(error_text):
        return "out of memory", "killed for memory"
    if exit_code is not None:
        return "exit code", f"exit code {exit_code}"
    if signal_name is not None:
        return "signal", signal_name
    for line in reversed(list(log_tail)):
        if line.startswith("Fatal Python error: "):
            fault = line.removeprefix("Fatal Python error: ").strip()
            return "signal", _FAULTS.get(fault, fault)
    if is_oom:
        return "out of memory", "killed for memory"
    return "signal", "SIGKILL (inferred: the process ended without a word)"


def choose_root(failures: Sequence[Failure]) -> Failure:
    """The cause among failures seen together: a process that ended comes before an exception that followed from it."""
    return min(failures, key=lambda failure: (not failure.is_death, failure.raised_at, failure.rank))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One worker process."""

    rank: int
    actor_name: str
    actor_id: str
    node_ip: str
    node_id: str
    pid: int
    raylet_pid: int
    host: str
    """Identity of kernel and pid namespace: equal hosts see each other's pids."""
    log_file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """One incarnation of the processes of a worker group, and who watches over them."""

    run_id: str
    name: str
    pool: str
    roles: tuple[str, ...]
    incarnation: int
    ranks: tuple[RankFacts, ...]
    supervisor: tuple[str, int]
    token: str
    controller_host: str

    def failure(self, rank: int, kind: str, detail: str, **more: Any) -> Failure:
        """A failure of one of these ranks."""
        facts = self.ranks[rank]
        more = {"role": "+".join(self.roles), **more}
        return Failure(
            kind=kind,
            detail=detail,
            group=self.name,
            pool=self.pool,
            rank=rank,
            world_size=len(self.ranks),
            node_ip=facts.node_ip,
            node_id=facts.node_id,
            pid=facts.pid,
            incarnation=self.incarnation,
            log_file=facts.log_file,
            **more,
        )
