"""Writes spans as they happen: a builder for one task, and an append-only file of records.

Cheap and always on: a task costs one line of JSON; the CPU time spent here is measured and handed out.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resources.telemetry.span_lines import encode
from resources.telemetry.spans import Collect, Dispatch, RankSpan, Record, TaskSpan, Waits
from resources.whole_lines import append_lines

SPANS_FILE = "spans.jsonl"


class SpanFile:
    """Appends records to a file, each whole or not at all, so that a crash can only cut the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own_cpu_seconds = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, *records: Record) -> None:
        """Writes the records. Raises OSError when the disk refuses, with the file as it was."""
        cpu = time.thread_time()
        append_lines(self.path, "".join(encode(record) for record in records), is_synced=False)
        self.own_cpu_seconds += time.thread_time() - cpu


class TaskTimer:
    """Builds the span of one task while it runs.

    >>> task = TaskTimer(iteration=0, task="reward", role="reward", pool="cpu")
    >>> with task.waiting("queue"):
    ...     pass
    >>> with task.dispatching(num_bytes=128):
    ...     pass
    >>> task.add_ranks([RankSpan(rank=0, start=task.started, end=task.started + 1.0)])
    >>> task.end().dispatch.bytes
    128
    """

    def __init__(
        self,
        *,
        iteration: int,
        task: str,
        role: str,
        pool: str,
        attempt: int = 1,
        node: str = "",
        submitted: float | None = None,
        upstream: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.started = clock()
        self._fixed: dict[str, Any] = {
            "iteration": iteration, "task": task, "role": role, "pool": pool, "attempt": attempt,
            "node": node, "submitted": submitted, "upstream": tuple(upstream), "started": self.started,
        }  # fmt: skip
        self._waits = {"upstream": 0.0, "weights": 0.0, "queue": 0.0}
        self._serialize_seconds = 0.0
        self._put_seconds = 0.0
        self._dispatch_bytes = 0
        self._collect_seconds = 0.0
        self._collect_bytes = 0
        self._ranks: list[RankSpan] = []
        self.facts: dict[str, Any] = {}

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Times a wait: `upstream`, `weights` or `queue`."""
        if kind not in self._waits:
            raise ValueError(f"{kind!r} is no kind of wait; known are {sorted(self._waits)}")
        begin = self._clock()
        try:
            yield
        finally:
            self._waits[kind] += self._clock() - begin

    @contextmanager
    def dispatching(self, num_bytes: int = 0) -> Iterator[None]:
        """Times serialising and splitting arguments."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add_dispatch(serialize_seconds=self._clock() - begin, num_bytes=num_bytes)

    def add_dispatch(self, *, serialize_seconds: float = 0.0, put_seconds: float = 0.0, num_bytes: int = 0) -> None:
        """Adds what a worker group measured of one call."""
        self._serialize_seconds += serialize_seconds
        self._put_seconds += put_seconds
        self._dispatch_bytes += num_bytes

    @contextmanager
    def collecting(self, num_bytes: int = 0) -> Iterator[None]:
        """Times bringing answers back, from the moment the last rank has ended."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add_collect(self._clock() - begin, num_bytes)

    def add_collect(self, seconds: float, num_bytes: int = 0) -> None:
        self._collect_seconds += seconds
        self._collect_bytes += num_bytes

    def add_ranks(self, ranks: Sequence[RankSpan | Mapping[str, Any]]) -> None:
        """Adds the ranks' spans, or what their statuses carry (a mapping with at least rank, start, end)."""
        self._ranks += [rank if isinstance(rank, RankSpan) else RankSpan.from_json(rank) for rank in ranks]

    def end(self) -> TaskSpan:
        """The finished span."""
        return TaskSpan(
            **self._fixed,
            ended=self._clock(),
            waits=Waits(**self._waits),
            dispatch=Dispatch(
                serialize_seconds=self._serialize_seconds, put_seconds=self._put_seconds, bytes=self._dispatch_bytes
            ),
            collect=Collect(seconds=self._collect_seconds, bytes=self._collect_bytes),
            ranks=tuple(self._ranks),
            facts=self.facts,
        )
