"""The reward loop: grades responses while others are still being sampled, and waits only for what is left.

One asyncio loop on a thread of its own serves every kind of grader; `begin` and `finish` are called from any other
thread. A response is graded once, whichever way it came first, and scores are joined by row id.
"""

import asyncio
import collections
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from resources.grader_calls import PoolBackend
from resources.grader_pool import GraderPool, PoolFunction
from resources.graders import Grader, GraderFailedError, Outcome, Sample
from resources.reward_scores import NAN, Grade

T = TypeVar("T")

OPEN_BATCHES = 8
"""Batches begun and never finished (their iteration failed) are forgotten beyond so many."""
_START_SECONDS = 180.0


class RewardStoppedError(RuntimeError):
    """A grader failed whose policy is to end the run."""


class Backend(Protocol):
    """Runs the calls of one grader."""

    @property
    def workers(self) -> int:
        """Calls that can be under way at once."""
        ...

    async def grade(self, grader: Grader, samples: Sequence[Sample]) -> Outcome:
        """Scores of one call. Raises GraderFailedError."""
        ...

    async def close(self) -> None: ...


@dataclass(kw_only=True)
class _Batch:
    samples: dict[int, Sample] = field(default_factory=dict)
    tasks: dict[tuple[str, int], asyncio.Task[dict[int, Grade]]] = field(default_factory=dict)
    """(grader, row id) -> the call for it; a group-wise call stands under its group's id."""
    grouped: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    active: int = 0
    active_since: float = 0.0
    busy_seconds: float = 0.0
    """Time in which at least one call was under way."""

    def enter(self) -> None:
        if self.active == 0:
            self.active_since = time.monotonic()
        self.active += 1

    def leave(self) -> None:
        self.active -= 1
        if self.active == 0:
            self.busy_seconds += time.monotonic() - self.active_since

    def busy_until_now(self) -> float:
        running = time.monotonic() - self.active_since if self.active else 0.0
        return self.busy_seconds + running


@dataclass(frozen=True, kw_only=True)
class BatchGrades:
    """Grades by row id and grader, and how long grading went on before it was asked for."""

    grades: Mapping[int, Mapping[str, Grade]]
    hidden_seconds: float


class RewardLoop:
    """Graders with their processes and connections; `close()` ends them."""

    def __init__(
        self, graders: Sequence[Grader], processes: int, backends: Mapping[str, Backend] | None = None
    ) -> None:
        """Args:
            graders: of kind `model` too, though those are left alone: their scores come from a worker group.
            processes: grader processes that compute at a time.
            backends: grader name -> what runs it, for kinds other than rule and python.

        Raises GraderImportError for a function that this node lacks.
        """
        self.graders = tuple(graders)
        self._backends = dict(backends or {})
        self._batches: collections.OrderedDict[str, _Batch] = collections.OrderedDict()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        pooled = [grader for grader in self.graders if grader.kind in ("rule", "python")]
        self.pool: GraderPool | None = None
        is_up = False
        try:
            if pooled:
                self.pool = self._wait(self._open_pool(pooled, processes), _START_SECONDS)
            is_up = True
        finally:
            if not is_up:
                self.close()

    @property
    def workers(self) -> dict[str, int]:
        """Grader -> calls that can be under way at once."""
        return {name: backend.workers for name, backend in self._backends.items()}

    def begin(self, batch_id: str, samples: Sequence[Sample], group_sizes: Mapping[int, int] | None = None) -> None:
        """Start grading; returns at once. With `group_sizes` (by group id) a group starts with its last sibling."""
        self._loop.call_soon_threadsafe(self._begin, batch_id, list(samples), dict(group_sizes or {}))

    def finish(self, batch_id: str, samples: Sequence[Sample], timeout: float) -> BatchGrades:
        """Grades of exactly these samples, begun or not; what is not graded after `timeout` seconds is unscorable.

        Raises RewardStoppedError, and ValueError for a source that no grader scores.
        """
        return self._wait(self._finish(batch_id, list(samples), timeout), timeout + 10.0)

    def forget(self, batch_id: str) -> None:
        """Drop a batch that will not be finished, and end its calls."""
        self._loop.call_soon_threadsafe(self._forget, batch_id)

    def close(self) -> None:
        """End grader processes, connections and the thread."""
        if not self._thread.is_alive():
            return
        self._wait(self._close(), 30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _open_pool(self, graders: Sequence[Grader], processes: int) -> GraderPool:
        functions = [
            PoolFunction(
                target=str(g.function), options=dict(g.options), modules=g.modules, is_group_wise=g.is_group_wise
            )
            for g in graders
        ]
        pool = GraderPool(functions, processes)
        await pool.start()
        for index, grader in enumerate(graders):
            self._backends[grader.name] = PoolBackend(pool, index)
        return pool

    async def _close(self) -> None:
        for batch_id in list(self._batches):
            self._forget(batch_id)
        for backend in self._backends.values():
            await backend.close()
        if self.pool is not None:
            await self.pool.close()
        rest = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _batch(self, batch_id: str) -> _Batch:
        if batch_id not in self._batches:
            self._batches[batch_id] = _Batch()
            while len(self._batches) > OPEN_BATCHES:
                self._forget(next(iter(self._batches)))
        return self._batches[batch_id]

    def _forget(self, batch_id: str) -> None:
        batch = self._batches.pop(batch_id, None)
        for task in batch.tasks.values() if batch else ():
            task.cancel()

    def _begin(self, batch_id: str, samples: list[Sample], group_sizes: dict[int, int]) -> None:
        batch = self._batch(batch_id)
        for sample in samples:
            self._start(batch, sample)
        for group_id, size in group_sizes.items():
            siblings = [one for one in batch.samples.values() if one.group_id == group_id]
            if len(siblings) == size:
                self._start_group(batch, siblings)

    def _start(self, batch: _Batch, sample: Sample) -> None:
        """Grade a sample unless this very response is being graded; another one under its row id replaces it."""
        if batch.samples.get(sample.row_id) == sample:
            return
        batch.samples[sample.row_id] = sample
        for grader in self.graders:
            if grader.kind == "model" or grader.is_group_wise or not grader.scores_source(sample.source):
                continue
            key = (grader.name, sample.row_id)
            if key in batch.tasks:
                batch.tasks.pop(key).cancel()
            batch.tasks[key] = self._loop.create_task(self._grade(batch, grader, [sample]))

    def _start_group(self, batch: _Batch, siblings: list[Sample]) -> None:
        ordered = sorted(siblings, key=lambda sample: sample.row_id)
        for grader in self.graders:
            if grader.kind == "model" or not grader.is_group_wise or not grader.scores_source(ordered[0].source):
                continue
            key = (grader.name, ordered[0].group_id)
            content = frozenset(hash((s.row_id, s.response)) for s in ordered)
            if batch.grouped.get(key) == content:
                continue
            if key in batch.tasks:
                batch.tasks.pop(key).cancel()
            batch.grouped[key] = content
            batch.tasks[key] = self._loop.create_task(self._grade(batch, grader, ordered))

    async def _grade(self, batch: _Batch, grader: Grader, samples: list[Sample]) -> dict[int, Grade]:
        batch.enter()
        try:
            return await self._grade_with_policy(grader, samples)
        finally:
            batch.leave()

    async def _grade_with_policy(self, grader: Grader, samples: list[Sample]) -> dict[int, Grade]:
        seconds: list[float] = []
        timeouts = 0
        for attempt in range(1, grader.attempts + 1):
            try:
                outcome = await self._backends[grader.name].grade(grader, samples)
            except GraderFailedError as error:
                seconds.append(error.seconds)
                timeouts += error.cause == "timeout"
                if attempt < grader.attempts:
                    continue
                text = f"grader {grader.name!r}, {error.cause}: {error}"
                failed = Grade(score=NAN, cause=error.cause, text=text)
                return _with_calls(dict.fromkeys((s.row_id for s in samples), failed), samples, seconds, timeouts)
            seconds.append(outcome.seconds)
            found = {s.row_id: Grade(score=score) for s, score in zip(samples, outcome.scores, strict=True)}
            return _with_calls(found, samples, seconds, timeouts)
        raise AssertionError("a grader makes at least one attempt")

    async def _finish(self, batch_id: str, samples: list[Sample], timeout: float) -> BatchGrades:
        self._check_sources(samples)
        batch = self._batch(batch_id)
        hidden = batch.busy_until_now()
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            self._start(batch, sample)
            groups.setdefault(sample.group_id, []).append(sample)
        for siblings in groups.values():
            self._start_group(batch, siblings)
        wanted = {
            (g.name, one) for g in self.graders for one in (groups if g.is_group_wise else [s.row_id for s in samples])
        }
        tasks = {key: task for key, task in batch.tasks.items() if key in wanted}
        try:
            grades = await self._collect(tasks, samples, timeout)
        finally:
            self._forget(batch_id)
            if self.pool is not None and not self._batches:
                self.pool.shrink()
        return BatchGrades(grades=grades, hidden_seconds=hidden)

    async def _collect(
        self, tasks: Mapping[tuple[str, int], asyncio.Task[dict[int, Grade]]], samples: list[Sample], timeout: float
    ) -> dict[int, dict[str, Grade]]:
        stops = {grader.name for grader in self.graders if grader.on_failure == "stop"}
        grades: dict[int, dict[str, Grade]] = {sample.row_id: {} for sample in samples}
        names = {task: name for (name, _), task in tasks.items()}
        owners = {task: key for key, task in tasks.items()}
        pending = set(names)
        end = time.monotonic() + timeout
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._give_up(pending, owners, grades, samples, timeout)
                break
            for task in done:
                for row_id, grade in task.result().items():
                    if grade.cause is not None and names[task] in stops:
                        raise RewardStoppedError(f"row {row_id}: {grade.text}; reward.graders' on_failure is stop")
                    if row_id in grades:
                        grades[row_id][names[task]] = grade
        return grades

    def _give_up(
        self,
        pending: set[asyncio.Task[dict[int, Grade]]],
        owners: Mapping[asyncio.Task[dict[int, Grade]], tuple[str, int]],
        grades: Mapping[int, dict[str, Grade]],
        samples: Sequence[Sample],
        timeout: float,
    ) -> None:
        """At the batch's deadline: what is left is unscorable, or ends the run where a grader's policy says so."""
        by_name = {grader.name: grader for grader in self.graders}
        text = f"not graded within the {timeout:g} s that the batch had"
        for name, owner in sorted(owners[task] for task in pending):
            if by_name[name].on_failure == "stop":
                raise RewardStoppedError(f"grader {name!r}: {text}; reward.graders' on_failure is stop")
            failed = Grade(score=NAN, cause="timeout", text=f"grader {name!r}, timeout: {text}", timeouts=1)
            for sample in samples:
                if owner == (sample.group_id if by_name[name].is_group_wise else sample.row_id):
                    grades[sample.row_id][name] = failed

    def _check_sources(self, samples: Sequence[Sample]) -> None:
        for source in sorted({sample.source for sample in samples}):
            if not any(grader.scores_source(source) for grader in self.graders):
                known = {grader.name: grader.sources for grader in self.graders}
                raise ValueError(f"no grader scores data source {source!r}; graders and their sources are {known}")


def _with_calls(
    grades: dict[int, Grade], samples: Sequence[Sample], seconds: Sequence[float], timeouts: int
) -> dict[int, Grade]:
    first = samples[0].row_id
    grade = grades[first]
    told = Grade(score=grade.score, cause=grade.cause, text=grade.text, seconds=tuple(seconds), timeouts=timeouts)
    return {**grades, first: told}
