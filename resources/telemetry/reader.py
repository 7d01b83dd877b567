"""Reads spans back, iteration by iteration, and says what is missing instead of failing.

Tolerates a cut or garbled line, a run that stopped half-way, records of an older or newer version and several attempts
of an iteration. Times come out on the controller's clock, those of an older version corrected by its clock records.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from resources.telemetry.clocks import correct_span
from resources.telemetry.recorder import SPANS_FILE
from resources.telemetry.span_lines import decode
from resources.telemetry.spans import SCHEMA_VERSION, ClockRecord, IterationSpan, RunRecord, TaskSpan

_MAX_OPEN = 16
"""Iterations held open at once; older ones without an end record are given out. Async depth stays far below."""

CLOCK_SLACK_SECONDS = 0.005
"""A task that starts this much before its upstream ended speaks of clocks that differ, not of jitter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationRecord:
    """The spans of one attempt of one iteration; `span` is None if it never ended."""

    iteration: int
    attempt: int
    tasks: tuple[TaskSpan, ...]
    span: IterationSpan | None


@dataclass(kw_only=True, slots=True)
class SpanReader:
    """Reads one run. `run` and `missing` are complete after `iterations()` is exhausted."""

    path: Path
    """The run directory, or the spans file itself."""
    run: RunRecord | None = None
    _bad_lines: list[tuple[int, str]] = field(default_factory=list)
    _notes: Counter[str] = field(default_factory=Counter)
    _tasks_of: dict[int, list[str]] = field(default_factory=dict)
    _clocks: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    """Two nodes -> tasks that began on one before what they wait for had ended on the other."""

    def iterations(self) -> Iterator[IterationRecord]:
        """Iterations in the order in which they ended. Raises FileNotFoundError if there is no spans file."""
        path = self.path / SPANS_FILE if os.path.isdir(self.path) else self.path
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} does not exist; `telemetry.enabled: true` writes it while a run goes on")
        offsets: dict[str, float] = {}
        open_iterations: dict[tuple[int, int], list[TaskSpan]] = {}
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = decode(line)
                except ValueError as error:
                    self._bad_lines.append((number, "cut short" if not line.endswith(b"\n") else str(error)[:120]))
                    continue
                if isinstance(record, TaskSpan):
                    open_iterations.setdefault((record.iteration, record.attempt), []).append(
                        correct_span(record, offsets)
                    )
                    if len(open_iterations) > _MAX_OPEN:
                        key = min(open_iterations)
                        yield self._closed(key, open_iterations.pop(key), None)
                elif isinstance(record, IterationSpan):
                    key = (record.iteration, record.attempt)
                    yield self._closed(key, open_iterations.pop(key, []), record)
                elif isinstance(record, ClockRecord):
                    offsets = {**offsets, **record.offsets}
                else:
                    offsets = {}  # those of a process before this one; a run that goes on may be of a newer version
                    self._see_run(record)
        for key in sorted(open_iterations):
            yield self._closed(key, open_iterations[key], None)

    def _see_run(self, record: RunRecord) -> None:
        self.run = record
        if record.schema < SCHEMA_VERSION:
            age, effect = "an older", "what it did not record is taken as 0"
        elif record.schema > SCHEMA_VERSION:
            age, effect = "a newer", "what it added is ignored"
        else:
            return
        self._notes[f"written by {age} version (schema {record.schema}, this is {SCHEMA_VERSION}): {effect}"] += 1

    def _closed(self, key: tuple[int, int], tasks: list[TaskSpan], span: IterationSpan | None) -> IterationRecord:
        self._tasks_of[key[0]] = [task.task for task in tasks]
        if span is None:
            self._note_unfinished(key, tasks)
        elif not tasks:
            self._notes[f"iteration {key[0]}: no task was recorded"] += 1
        self._note_clocks(tasks)
        return IterationRecord(iteration=key[0], attempt=key[1], tasks=tuple(tasks), span=span)

    def _note_unfinished(self, key: tuple[int, int], tasks: list[TaskSpan]) -> None:
        there = {task.task for task in tasks}
        before = next((names for number, names in sorted(self._tasks_of.items(), reverse=True) if number < key[0]), [])
        absent = [name for name in before if name not in there]
        last = max(tasks, key=lambda task: task.ended).task if tasks else "nothing"
        self._notes[
            f"iteration {key[0]} (attempt {key[1]}) did not end: last was {last}"
            + (f"; not recorded: {', '.join(absent)}" if absent else "")
        ] += 1

    def _note_clocks(self, tasks: list[TaskSpan]) -> None:
        ends = {task.task: task for task in tasks}
        for task in tasks:
            for name in task.upstream:
                upstream = ends.get(name)
                begin = min((rank.start for rank in task.ranks), default=task.started)
                if upstream is None or upstream.node == task.node or begin >= upstream.ended - CLOCK_SLACK_SECONDS:
                    continue
                nodes = tuple(sorted((upstream.node or "(unnamed)", task.node or "(unnamed)")))
                example = f"{task.task} starts {upstream.ended - begin:.3g} s before {name} ended"
                self._clocks.setdefault(nodes, []).append(example)

    @property
    def missing(self) -> tuple[str, ...]:
        """What could not be read or was not there, in sentences."""
        notes = [note if count == 1 else f"{note} ({count} times)" for note, count in self._notes.items()]
        notes += [
            f"clocks of nodes {' and '.join(nodes)} differ by what no offset accounts for: {found[0]}; {len(found)}"
            f" such overlap{'s are' if len(found) > 1 else ' is'} cut"
            for nodes, found in self._clocks.items()
        ]
        if self.run is None:
            notes.append("no run record: pools, cores and batch sizes are inferred from the ranks seen")
        if self._bad_lines:
            first = ", ".join(f"line {number}: {why}" for number, why in self._bad_lines[:3])
            notes.append(
                f"{len(self._bad_lines)} line{'s' if len(self._bad_lines) > 1 else ''} could not be read ({first})"
            )
        return tuple(notes)
