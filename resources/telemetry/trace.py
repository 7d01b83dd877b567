"""Chrome / Perfetto trace of all ranks: open the file at ui.perfetto.dev or chrome://tracing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resources.telemetry.reader import SpanReader
from resources.telemetry.spans import CONTROLLER, RankSpan, TaskSpan
from resources.telemetry.task_ranks import role_of

_PHASES = ("transfer", "forward", "backward", "optimizer", "communication")


def write_trace(run_dir: Path, path: Path, *, first: int = 0, last: int | None = None) -> int:
    """Writes iterations [first, last] as trace events; returns how many. A process a role and pool, a thread a rank.

    Phases of a rank (forward, backward, ...) are totals, not stretches: they are arguments of the rank's event.
    """
    ids: dict[str, int] = {}
    count = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for record in SpanReader(path=run_dir).iterations():
            if record.iteration < first or (last is not None and record.iteration > last):
                continue
            events: list[dict[str, Any]] = []
            if record.span is not None:
                name = f"iteration {record.iteration}" + (f" attempt {record.attempt}" if record.attempt > 1 else "")
                events.append(
                    _event(name, CONTROLLER, 0, record.span.started, record.span.ended, ids, dict(record.span.facts))
                )
            for task in record.tasks:
                events += _task_events(task, ids)
            for event in events:
                file.write(("," if count else "") + json.dumps(event, separators=(",", ":")))
                count += 1
        for name, number in ids.items():
            event = {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
            file.write(("," if count else "") + json.dumps(event, separators=(",", ":")))
            count += 1
        file.write("]}\n")
    return count


def _task_events(task: TaskSpan, ids: dict[str, int]) -> Iterator[dict[str, Any]]:
    group = f"{role_of(task)} ({task.pool})"
    yield _event(
        task.task, group, 0, task.started, task.ended, ids, {"iteration": task.iteration, "bytes": task.dispatch.bytes}
    )
    for rank in task.ranks:
        name = f"{task.task}: {rank.duty}" if rank.duty else task.task
        yield _event(name, group, rank.rank + 1, rank.start, rank.end, ids, _arguments(rank))
        if "running" in rank.facts:
            for at, running in rank.facts["running"]:
                time = (rank.start + at) * 1e6
                yield {
                    "ph": "C",
                    "name": f"running {rank.rank}",
                    "pid": ids[group],
                    "ts": time,
                    "args": {"sequences": running},
                }


def _arguments(rank: RankSpan) -> dict[str, Any]:
    phases = {f"{name}_seconds": getattr(rank, f"{name}_seconds") for name in _PHASES}
    plain = {key: value for key, value in rank.facts.items() if isinstance(value, int | float | str)}
    return {"node": rank.node, "queue_seconds": rank.queue_seconds, **{k: v for k, v in phases.items() if v}, **plain}


def _event(
    name: str, group: str, thread: int, start: float, end: float, ids: dict[str, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    number = ids.setdefault(group, len(ids) + 1)
    return {
        "ph": "X",
        "name": name,
        "pid": number,
        "tid": thread,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": arguments,
    }
