"""Hand-made iterations of the PPO DAG: a balanced one, and what it takes to plant a bottleneck in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from resources.telemetry.probes import GraderLatency
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from resources.telemetry.spans import Collect, Dispatch, IterationSpan, PoolRecord, RankSpan, RunRecord, TaskSpan

SECONDS = {
    "rollout": 3.0, "reward": 0.1, "reference": 0.5, "actor-log-probs": 0.5, "critic-values": 0.5,
    "advantage": 0.05, "critic-update": 1.6, "actor-update": 1.8, "weight-sync": 0.3,
}  # fmt: skip
UPSTREAM = {
    "reward": ("rollout",),
    "reference": ("rollout",),
    "actor-log-probs": ("rollout",),
    "critic-values": ("rollout",),
    "advantage": ("reward", "reference", "actor-log-probs", "critic-values"),
    "critic-update": ("advantage",),
    "actor-update": ("advantage",),
    "weight-sync": ("actor-update", "critic-update"),
}
ROLES = {
    "rollout": "rollout", "reward": "reward", "reference": "reference", "actor-log-probs": "actor",
    "critic-values": "critic", "advantage": "advantage", "critic-update": "critic", "actor-update": "actor",
    "weight-sync": "actor",
}  # fmt: skip

Plant = Callable[[TaskSpan], TaskSpan]


def iteration(
    number: int = 0,
    start: float = 0.0,
    *,
    gap: float = 0.01,
    seconds: Mapping[str, float] | None = None,
    serialize: Mapping[str, float] | None = None,
    collect: Mapping[str, float] | None = None,
    ranks: Mapping[str, Callable[[float, float], Sequence[RankSpan]]] | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    attempt: int = 1,
) -> tuple[list[TaskSpan], IterationSpan]:
    """Every role on its own pool; each task starts `gap` after its last upstream ended."""
    durations = {**SECONDS, **(seconds or {})}
    ends: dict[str, float] = {}
    spans: list[TaskSpan] = []
    for task, duration in durations.items():
        before = (serialize or {}).get(task, 0.0)
        after = (collect or {}).get(task, 0.0)
        submitted = max((ends[name] for name in UPSTREAM.get(task, ())), default=start)
        started = submitted + gap
        begin, end = started + before, started + before + duration
        made = ranks[task](begin, end) if ranks and task in ranks else (RankSpan(rank=0, start=begin, end=end),)
        ends[task] = max(rank.end for rank in made) + after
        spans.append(
            TaskSpan(
                iteration=number, attempt=attempt, task=task, role=ROLES[task], pool=ROLES[task], submitted=submitted,
                started=started, ended=ends[task], upstream=UPSTREAM.get(task, ()), ranks=tuple(made),
                dispatch=Dispatch(serialize_seconds=before, bytes=int(before * 1e8)),
                collect=Collect(seconds=after, bytes=int(after * 1e8)), facts=(facts or {}).get(task, {}),
            )
        )  # fmt: skip
    return spans, IterationSpan(iteration=number, started=start, ended=max(ends.values()) + gap, attempt=attempt)


def grader_facts(latencies: Sequence[float], kind: str = "rule", workers: int = 1) -> dict[str, Any]:
    """The reward task's facts for these calls."""
    grader = GraderLatency("math", kind, workers)
    for seconds in latencies:
        grader.add(seconds)
    return {"graders": [grader.facts()]}


def even_ranks(count: int, **facts: Any) -> Callable[[float, float], list[RankSpan]]:
    return lambda begin, end: [RankSpan(rank=rank, start=begin, end=end, facts=facts) for rank in range(count)]


def write_run(
    folder: Path, iterations: Sequence[tuple[Sequence[TaskSpan], IterationSpan | None]], run: RunRecord | None = None
) -> Path:
    """A run directory with these iterations."""
    file = SpanFile(folder / SPANS_FILE)
    if run is not None:
        file.append(run)
    for tasks, span in iterations:
        file.append(*tasks, *([span] if span is not None else []))
    return folder


def run_record(**changes: Any) -> RunRecord:
    """Every role on a pool of one rank, on two cores."""
    record = RunRecord(
        run="hand-made",
        cores_per_node=2.0,
        pools={role: PoolRecord(ranks=1) for role in set(ROLES.values())},
        roles={role: role for role in set(ROLES.values())},
        prompts_per_iteration=8,
        group_size=4,
        max_running_sequences=64,
    )
    return replace(record, **changes)
