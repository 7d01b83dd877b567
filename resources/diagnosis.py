"""From the error Ray raised to the one failure a person should read: whose, why, and what the others did."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from resources.failures import (
    CallTimeout,
    Failure,
    GroupFacts,
    RankError,
    StaleGroup,
    WorkerFailed,
    choose_root,
    death_kind,
)
from resources.heartbeat import read_tail
from resources.process_facts import host_identity

SETTLE_SECONDS = 2.0
"""After a first error the other ranks get this long to answer or fail; then they count as blocked."""
_EVIDENCE_SECONDS = 3.0
_POLL_SECONDS = 0.05


class Watched(Protocol):
    """Processes as diagnosis sees them, whether owned or attached."""

    facts: GroupFacts

    def release_peers(self, failure: Failure) -> Failure: ...

    def evidence(self, timeout: float) -> Failure | None: ...

    def newest_incarnation(self) -> int: ...

    def log_tail(self, rank: int) -> list[str]: ...

    def running(self) -> list[tuple[str | None, float]]: ...


def diagnose(
    processes: Watched, refs: Mapping[int, Any], error: BaseException, role: str, method: str, seconds: float
) -> WorkerFailed:
    """The error to raise for a call (rank -> ref) that ended in `error`.

    A plain exception leaves the group usable if every rank has answered; a death, a missed deadline or a rank that is
    still blocked ends the whole group.
    """
    is_late = isinstance(error, GetTimeoutError)
    failures, pending = _settle(processes, refs, role, method, 0.0 if is_late else SETTLE_SECONDS)
    if not failures:
        late = _deadline(processes, pending or sorted(refs), role, method, seconds)
        return CallTimeout(processes.release_peers(late))
    root = choose_root(failures)
    if root.kind == "stale":
        return StaleGroup(root)
    if root.is_death and processes.newest_incarnation() > processes.facts.incarnation:
        detail = (
            f"call of incarnation {root.incarnation}; the group is at {processes.newest_incarnation()}, attach again"
        )
        return StaleGroup(replace(root, kind="stale", detail=detail))
    if root.is_death:
        known = processes.evidence(_EVIDENCE_SECONDS)
        root = root if known is None else known
    if root.is_death or pending:
        root = processes.release_peers(_with_tail(processes, root))
    # The supervisor may not have heard of the call yet: beats are a second apart.
    return WorkerFailed(_with_tail(processes, root if root.method else replace(root, role=role, method=method)))


def await_evidence(look: Callable[[], Failure | None], timeout: float) -> Failure | None:
    """Ask `look` until it has an answer or the time is up."""
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)


def _settle(
    processes: Watched, refs: Mapping[int, Any], role: str, method: str, seconds: float
) -> tuple[list[Failure], list[int]]:
    """The failures of the ranks that have ended, and the ranks that have not."""
    ranks = {ref: rank for rank, ref in refs.items()}
    done, waiting = ray.wait(list(ranks), num_returns=len(ranks), timeout=seconds, fetch_local=False)
    failures: list[Failure] = []
    for ref in done:
        try:
            ray.get(ref, timeout=_EVIDENCE_SECONDS)
        except RayError as error:
            failures.append(_failure_of(processes.facts, ranks[ref], error, role, method))
    return failures, sorted(ranks[ref] for ref in waiting)


def _failure_of(facts: GroupFacts, rank: int, error: RayError, role: str, method: str) -> Failure:
    now = time.monotonic()
    if isinstance(error, RayActorError):
        kind, detail = death_kind(str(error), None, None, (), is_oom=False)
        return facts.failure(rank, kind, detail, role=role, method=method, raised_at=now)
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RankError) and cause.type_name == "StaleGroup":
        return facts.failure(rank, "stale", cause.text, role=role, method=method)
    if isinstance(cause, RankError):
        return facts.failure(
            rank,
            "exception",
            str(cause),
            role=role,
            method=method,
            exception_type=cause.type_name,
            trace=cause.trace,
            raised_at=cause.raised_at,
        )
    first_line = (str(cause).strip().splitlines() or [""])[0]
    return facts.failure(
        rank,
        "exception",
        f"{type(cause).__name__}: {first_line}",
        role=role,
        method=method,
        exception_type=type(cause).__name__,
        trace=str(error),
        raised_at=now,
    )


def _deadline(processes: Watched, pending: Sequence[int], role: str, method: str, seconds: float) -> Failure:
    running = processes.running()
    waiting: list[str] = []
    for rank in pending:
        doing, silent = running[rank] if rank < len(running) else (None, 0.0)
        waiting.append(f"rank {rank} ({doing or 'no call begun'}, last beat {silent:.1f} s ago)")
    detail = f"{len(pending)} of {len(processes.facts.ranks)} ranks did not answer within {seconds:g} s"
    failure = processes.facts.failure(
        pending[0], "deadline", detail, role=role, method=method, pending=tuple(waiting), raised_at=time.monotonic()
    )
    return _with_tail(processes, failure)


def _with_tail(processes: Watched, failure: Failure) -> Failure:
    if failure.log_tail or failure.log_file is None:
        return failure
    # The file itself is newer than the last beat wherever this machine can read it.
    is_here = processes.facts.ranks[failure.rank].host in ("", host_identity())
    lines = read_tail(Path(failure.log_file)) if is_here else []
    return failure.with_tail(lines or processes.log_tail(failure.rank))
