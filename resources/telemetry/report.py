"""A run's report: what held it back, role by role, from its spans, metrics and samples.

Reads the spans once, an iteration at a time, and keeps figures; full time lines only of the slowest and the last
iteration. What is missing is named, never guessed over.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resources.telemetry.attribution import IterationTimes, attribute
from resources.telemetry.causes import DEFAULT_THRESHOLDS, Candidate, Thresholds
from resources.telemetry.detectors import find_candidates
from resources.telemetry.profile import RunProfile, measure_profile
from resources.telemetry.reader import IterationRecord, SpanReader
from resources.telemetry.search import SearchResult, search_topology
from resources.telemetry.spans import RunRecord, TaskSpan
from resources.telemetry.task_ranks import is_rollout, role_of, role_of_rank
from resources.telemetry.timeline import Kind, Timeline
from resources.telemetry.verdict import Verdict, choose, judge_run

METRICS_FILE = "metrics.jsonl"
_MAX_SAMPLES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationSummary:
    """One iteration in figures."""

    times: IterationTimes
    path_seconds: Mapping[tuple[str, Kind], float]
    verdict: Verdict
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationDetail:
    """One iteration in full, for time lines."""

    why: str
    timeline: Timeline
    times: IterationTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFacts:
    """One role over the run: means of rank facts over ranks and iterations, maxima where the name ends in max."""

    role: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything the text and HTML forms show."""

    run_dir: Path
    run: RunRecord | None
    verdict: Verdict | None
    """None if no iteration can be judged."""
    iterations: tuple[IterationSummary, ...]
    details: tuple[IterationDetail, ...]
    role_facts: tuple[RoleFacts, ...]
    graders: tuple[Mapping[str, Any], ...]
    """One entry a grader, latencies of its slowest iteration, calls summed."""
    length_histogram: Mapping[int, int]
    running: tuple[tuple[str, int, Sequence[Sequence[float]]], ...]
    """(engine, slots, running series) of the detail iteration: the long-tail plot."""
    metrics: Mapping[str, Sequence[tuple[int, float]]]
    samples: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...]

    @property
    def complete(self) -> tuple[IterationSummary, ...]:
        return tuple(summary for summary in self.iterations if summary.times.is_complete)

    def to_json(self) -> dict[str, Any]:
        """For `callsheet report --json`."""
        steps = [summary.times.step_seconds for summary in self.complete]
        return {
            "run": self.run_dir.name,
            "iterations": len(self.complete),
            "step_seconds": sum(steps) / len(steps) if steps else None,
            "verdict": self.verdict.to_json() if self.verdict is not None else None,
            "roles": role_table(self),
            "missing": list(self.missing),
        }


def build_report(
    run_dir: Path, *, thresholds: Thresholds = DEFAULT_THRESHOLDS, samples: Sequence[Mapping[str, Any]] | None = None
) -> Report:
    """Report of a run directory, whatever state it is in.

    `samples` default to the newest file under `samples/`. Raises FileNotFoundError if there are no spans at all.
    """
    reader = SpanReader(path=run_dir)
    collector = _Collector(thresholds)
    for record, others in _with_neighbours(reader.iterations()):
        collector.add(record, others)
    metrics, metric_notes = read_metrics(run_dir / METRICS_FILE)
    found, sample_notes = (list(samples), []) if samples is not None else read_samples(run_dir / "samples")
    return collector.report(run_dir, reader, metrics, found, [*reader.missing, *metric_notes, *sample_notes])


def _with_neighbours(records: Iterator[IterationRecord]) -> Iterator[tuple[IterationRecord, Sequence[TaskSpan]]]:
    """Each iteration with the tasks of the one before and the one after it, which may overlap its step."""
    before: tuple[TaskSpan, ...] = ()
    current = next(records, None)
    while current is not None:
        after = next(records, None)
        yield current, (*before, *(after.tasks if after is not None else ()))
        before, current = current.tasks, after


class _Collector:
    """Folds iterations into figures."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._summaries: dict[int, IterationSummary] = {}
        self._candidates: dict[int, list[Candidate]] = {}
        self._slowest: IterationDetail | None = None
        self._last: IterationDetail | None = None
        self._attempts = 0
        self._lengths: dict[int, int] = defaultdict(int)
        self._facts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, -math.inf]))
        self._graders: dict[str, dict[str, Any]] = {}

    def add(self, record: IterationRecord, others: Sequence[TaskSpan]) -> None:
        if not record.tasks:
            return
        span = record.span
        timeline, times = attribute(
            record.tasks,
            start=span.started if span is not None else None,
            end=span.ended if span is not None else None,
            others=others,
            is_complete=span is not None,
        )
        if record.iteration in self._summaries:
            self._attempts += 1
        candidates = find_candidates(timeline, self._thresholds)
        self._candidates[record.iteration] = candidates
        self._summaries[record.iteration] = IterationSummary(
            times=replace(times, path=()),
            path_seconds=times.path_seconds(),
            verdict=choose(candidates, timeline.step_seconds, self._thresholds),
            facts=span.facts if span is not None else {},
        )
        self._keep_detail(timeline, times)
        for task in record.tasks:
            self._fold_facts(task)

    def _keep_detail(self, timeline: Timeline, times: IterationTimes) -> None:
        self._last = IterationDetail(why="last", timeline=timeline, times=times)
        is_warm_up = len(self._summaries) == 1
        slowest = self._slowest.times.step_seconds if self._slowest is not None else 0.0
        if not is_warm_up and times.is_complete and times.step_seconds > slowest:
            self._slowest = replace(self._last, why="slowest")

    def _fold_facts(self, task: TaskSpan) -> None:
        own = self._facts[role_of(task)]
        for rank in task.ranks:
            by_name = self._facts[role_of_rank(task, rank)] if rank.duty else own
            for key, value in rank.facts.items():
                if type(value) is float or type(value) is int:  # the hot loop of a long run; bool is no figure
                    entry = by_name[key]
                    entry[0] += value
                    entry[1] += 1
                    if value > entry[2]:
                        entry[2] = value
        sources = [task.facts] if "response_length_histogram" in task.facts else [rank.facts for rank in task.ranks]
        for facts in sources:
            for edge, count in facts.get("response_length_histogram", {}).items():
                self._lengths[int(edge)] += count
        for grader in task.graders:
            self._fold_grader(grader)

    def _fold_grader(self, grader: Mapping[str, Any]) -> None:
        known = self._graders.setdefault(
            str(grader.get("name", "?")),
            {"calls": 0, "slow_calls": 0, "timeouts": 0, "total_seconds": 0.0, "max_seconds": -1.0},
        )
        if grader.get("max_seconds", 0.0) > known["max_seconds"]:
            known.update(
                {
                    key: grader[key]
                    for key in ("name", "kind", "workers", "p50_seconds", "p95_seconds", "max_seconds")
                    if key in grader
                }
            )
        for key in ("calls", "slow_calls", "timeouts", "total_seconds"):
            known[key] += grader.get(key, 0)

    def report(
        self,
        run_dir: Path,
        reader: SpanReader,
        metrics: Mapping[str, Sequence[tuple[int, float]]],
        samples: Sequence[Mapping[str, Any]],
        notes: Sequence[str],
    ) -> Report:
        ordered = [self._summaries[number] for number in sorted(self._summaries)]
        judged = [summary.times for summary in ordered if summary.times.is_complete]
        notes = list(notes)
        if len(judged) >= 3:
            judged = judged[1:]
        if self._attempts:
            notes.append(f"{self._attempts} iterations were run again; the latest attempt of each counts")
        if not judged:
            notes.append("no iteration is complete: no verdict on the run")
        verdict = (
            judge_run(
                [self._candidates[t.iteration] for t in judged], sum(t.step_seconds for t in judged), self._thresholds
            )
            if judged
            else None
        )
        if verdict is not None and reader.run is not None:
            verdict = replace(verdict, refused=reader.run.refused_changes)
        details = [detail for detail in (self._slowest, self._last) if detail is not None]
        if len(details) == 2 and details[0].times.iteration == details[1].times.iteration:
            details = details[:1]
        return Report(
            run_dir=run_dir,
            run=reader.run,
            verdict=verdict,
            iterations=tuple(ordered),
            details=tuple(details),
            role_facts=tuple(
                RoleFacts(role=role, values={key: _folded(key, entry) for key, entry in facts.items()})
                for role, facts in self._facts.items()
            ),
            graders=tuple(self._graders.values()),
            length_histogram=dict(sorted(self._lengths.items())),
            running=_running_of(details[0]) if details else (),
            metrics=metrics,
            samples=tuple(samples),
            missing=tuple(notes),
        )


def _folded(key: str, entry: Sequence[float]) -> float:
    return entry[2] if key.endswith("max") or key.startswith("peak") else entry[0] / entry[1]


def _running_of(detail: IterationDetail) -> tuple[tuple[str, int, Sequence[Sequence[float]]], ...]:
    found = []
    for task in detail.timeline.tasks.values():
        for rank in task.span.ranks:
            if is_rollout(task.span) and "running" in rank.facts:
                series = [[rank.start - detail.timeline.start + t, n] for t, n in rank.facts["running"]]
                found.append((f"engine {rank.rank}", int(rank.facts.get("slots", 0)), series))
    return tuple(found)


def role_table(report: Report) -> list[dict[str, Any]]:
    """Mean seconds a step of each role over complete iterations: busy, transfer, waiting by whom, idle; on the path."""
    totals: dict[str, dict[str, Any]] = {}
    for summary in report.complete:
        for role in summary.times.roles:
            entry = totals.setdefault(
                role.role, {"role": role.role, "busy": 0.0, "transfer": 0.0, "waiting": {}, "idle": 0.0, "path": 0.0}
            )
            for part in ("busy", "transfer", "idle"):
                entry[part] += getattr(role, part)
            entry["path"] += sum(seconds for (name, _), seconds in summary.path_seconds.items() if name == role.role)
            for whom, seconds in role.waiting.items():
                entry["waiting"][whom] = entry["waiting"].get(whom, 0.0) + seconds
    count = max(1, len(report.complete))
    for entry in totals.values():
        for part in ("busy", "transfer", "idle", "path"):
            entry[part] /= count
        entry["waiting"] = {
            whom: seconds / count for whom, seconds in sorted(entry["waiting"].items(), key=lambda item: -item[1])
        }
    return list(totals.values())


def read_metrics(path: Path) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """Finite numbers of metrics.jsonl by name, and what is wrong with the file."""
    if not path.is_file():
        return {}, [f"no {path.name}: no learning curves"]
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    bad = 0
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            bad += 1
            continue
        if not isinstance(record, dict):
            bad += 1
            continue
        iteration = record.get("iteration", number)
        if not isinstance(iteration, int):
            bad += 1
            continue
        for key, value in record.items():
            if (
                key != "iteration"
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                curves[key].append((iteration, float(value)))
    return dict(curves), [f"{bad} lines of {path.name} could not be read"] if bad else []


def read_samples(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the newest readable samples file (parquet, or JSON lines), at most 200."""
    files = sorted(folder.glob("*.parquet")) + sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        return [], ["no samples were stored: no samples table"]
    newest = files[-1]
    if newest.suffix == ".parquet":
        import pyarrow.parquet
        from pyarrow import ArrowException

        try:
            rows = pyarrow.parquet.read_table(newest).to_pylist()
            return sorted(rows, key=lambda row: row.get("tokens") is None)[:_MAX_SAMPLES], []  # with token detail first
        except (ArrowException, OSError) as error:
            return [], [f"samples {newest.name} could not be read: {error}"]
    rows: list[dict[str, Any]] = []
    for line in newest.read_text().splitlines()[:_MAX_SAMPLES]:
        try:
            rows.append(json.loads(line))
        except ValueError:
            return rows, [f"samples {newest.name} is cut short"]
    return rows, []


def profile_of_run(run_dir: Path) -> RunProfile:
    """What a run's spans measured. Raises ValueError if no iteration is complete."""
    reader = SpanReader(path=run_dir)
    return measure_profile(list(reader.iterations()), reader.run)


def search_layout(
    run_dir: Path, accelerators: int, *, max_async_depth: int = 0, limit_seconds: float = 8.0
) -> SearchResult:
    """The best layout for a number of accelerators, from a run's spans."""
    profile = profile_of_run(run_dir)
    return search_topology(profile, accelerators, max_async_depth=max_async_depth, limit_seconds=limit_seconds)
