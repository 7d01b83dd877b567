"""Discrete-event simulation of iterations: tasks with needs, resources that are exclusive or shared.

Pure and fluid: between two events every running task progresses at a speed set by what it shares. Knows nothing of
roles or configs; `whatif.py` makes the jobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One task of one simulated iteration."""

    key: str
    needs: tuple[int, ...]
    """Indices of jobs that end first."""
    delay: float
    """Seconds after those before it asks for its resources: scheduling, transfer."""
    seconds: float
    """Of work at full speed."""
    locks: tuple[str, ...] = ()
    """Resources it holds alone while it works: the worker processes of a fused pool, an engine."""
    cores: float = 0.0
    """Cores it keeps busy at full speed."""
    accelerator: str = ""
    """Pool whose accelerators it shares with whatever else runs there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """When a job was ready, worked and ended."""

    ready: float
    start: float
    end: float


def simulate(jobs: Sequence[Job], cores: float = 0.0) -> list[Outcome]:
    """Runs the jobs; `cores` of 0 means plenty.

    Jobs that wait for a lock get it in order of readiness. Running jobs that together want more cores than there are
    slow down alike; k jobs on one accelerator pool run at 1/k. Raises ValueError if jobs wait for each other in a ring.

    >>> two = [Job("a", (), 0.0, 2.0, cores=1.0), Job("b", (), 0.0, 2.0, cores=1.0)]
    >>> [outcome.end for outcome in simulate(two, cores=1.0)]
    [4.0, 4.0]
    """
    return _Simulation(jobs, cores).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], cores: float) -> None:
        self.jobs = jobs
        self.cores = cores
        self.pending = [len(job.needs) for job in jobs]
        self.followers: list[list[int]] = [[] for _ in jobs]
        for index, job in enumerate(jobs):
            for need in job.needs:
                self.followers[need].append(index)
        self.now = 0.0
        self.delayed: list[tuple[float, int]] = [(job.delay, i) for i, job in enumerate(jobs) if not job.needs]
        self.waiting: list[tuple[float, int]] = []
        self.left: dict[int, float] = {}
        self.held: set[str] = set()
        self.ready = [0.0] * len(jobs)
        self.started = [0.0] * len(jobs)
        self.ended = [-1.0] * len(jobs)

    def run(self) -> list[Outcome]:
        while self.delayed or self.waiting or self.left:
            self._admit()
            speeds = self._speeds()
            finish = min((self.left[i] / speed for i, speed in speeds.items()), default=float("inf"))
            arrive = min((at for at, _ in self.delayed), default=float("inf")) - self.now
            step = min(finish, arrive)
            self.now += step
            for index, speed in speeds.items():
                self.left[index] -= step * speed
            for index in [i for i, left in self.left.items() if left <= 1e-12]:
                self._end(index)
        if any(end < 0 for end in self.ended):
            stuck = [job.key for job, end in zip(self.jobs, self.ended, strict=True) if end < 0]
            raise ValueError(f"jobs {stuck[:4]} wait for each other; a DAG has no ring")
        return [Outcome(r, s, e) for r, s, e in zip(self.ready, self.started, self.ended, strict=True)]

    def _admit(self) -> None:
        """Moves jobs whose delay is over to the queue, and starts those whose locks are free."""
        for at, index in [entry for entry in self.delayed if entry[0] <= self.now + 1e-12]:
            self.delayed.remove((at, index))
            self.ready[index] = at
            self.waiting.append((at, index))
        self.waiting.sort()
        blocked: set[str] = set()
        for entry in list(self.waiting):
            job = self.jobs[entry[1]]
            if any(lock in self.held or lock in blocked for lock in job.locks):
                blocked.update(job.locks)  # first come, first served: later ones do not overtake
                continue
            self.waiting.remove(entry)
            self.held.update(job.locks)
            self.started[entry[1]] = self.now
            self.left[entry[1]] = job.seconds

    def _speeds(self) -> dict[int, float]:
        wanted = sum(self.jobs[i].cores for i in self.left)
        share = min(1.0, self.cores / wanted) if self.cores and wanted else 1.0
        on_pool: dict[str, int] = {}
        for index in self.left:
            pool = self.jobs[index].accelerator
            if pool:
                on_pool[pool] = on_pool.get(pool, 0) + 1
        return {i: (share if self.jobs[i].cores else 1.0) / on_pool.get(self.jobs[i].accelerator, 1) for i in self.left}

    def _end(self, index: int) -> None:
        del self.left[index]
        self.held.difference_update(self.jobs[index].locks)
        self.ended[index] = self.now
        for follower in self.followers[index]:
            self.pending[follower] -= 1
            if self.pending[follower] == 0:
                self.delayed.append((self.now + self.jobs[follower].delay, follower))


def busy_seconds(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], owner: Mapping[str, str], begin: float, end: float
) -> dict[str, float]:
    """Seconds within [begin, end] in which each owner (job key -> owner) had a job at work; overlaps count once."""
    intervals: dict[str, list[tuple[float, float]]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        low, high = max(begin, outcome.start), min(end, outcome.end)
        intervals.setdefault(owner[job.key], [])
        if high > low:
            intervals[owner[job.key]].append((low, high))
    totals = {}
    for name, stretches in intervals.items():
        total, cursor = 0.0, begin
        for low, high in sorted(stretches):
            total += max(0.0, high - max(low, cursor))
            cursor = max(cursor, high)
        totals[name] = total
    return totals
