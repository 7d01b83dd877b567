"""Telemetry's own cost: CPU per step, a long run's report, a search over 1,024 accelerators.

`python -m benchmarks.telemetry [--json]`. The step's telemetry is that of a quick-start step (nine tasks, two ranks),
with timers around every micro-batch; the CPU time is taken around exactly the calls a run makes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure, report
from resources.telemetry.attribution import attribute
from resources.telemetry.html_report import render_html
from resources.telemetry.probes import GraderLatency, MicroBatchFill, SystemSampler
from resources.telemetry.recorder import SPANS_FILE, SpanFile, TaskTimer
from resources.telemetry.report import build_report
from resources.telemetry.rollout_gauge import RolloutGauge, response_length_facts
from resources.telemetry.search import search_topology
from resources.telemetry.spans import IterationSpan, PoolRecord, RankSpan, RunRecord, TaskSpan
from resources.telemetry.study import Workload, synthetic_profile
from resources.telemetry.text_report import render_text
from resources.telemetry.timers import Timers
from resources.telemetry.verdict import judge

QUICK_START_STEP_SECONDS = 1.3
"""One iteration of the quick start on two cores."""
_STEPS = 40
_MICRO_BATCHES = 16
_DECODE_STEPS = 40
_RESPONSES = 512
_REPORT_ITERATIONS, _REPORT_RANKS = 1000, 64

TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rollout": ("rollout", ()),
    "reward": ("reward", ("rollout",)),
    "reference": ("reference", ("rollout",)),
    "actor-log-probs": ("actor", ("rollout",)),
    "critic-values": ("critic", ("rollout",)),
    "advantage": ("advantage", ("reward", "reference", "actor-log-probs", "critic-values")),
    "critic-update": ("critic", ("advantage",)),
    "actor-update": ("actor", ("advantage",)),
    "weight-sync": ("actor", ("critic-update", "actor-update")),
}


def one_step(iteration: int, file: SpanFile, sampler: SystemSampler) -> None:
    """Every telemetry call of one quick-start step, and none of its work."""
    spans: list[TaskSpan] = []
    for task, (role, upstream) in TASKS.items():
        timer = TaskTimer(
            iteration=iteration, task=task, role=role, pool="main", upstream=upstream, submitted=time.monotonic()
        )
        with timer.dispatching(num_bytes=4096):
            pass
        timer.add_ranks([_rank(rank, role, task) for rank in range(2)])
        with timer.collecting(num_bytes=1024):
            pass
        spans.append(timer.end())
    ended = IterationSpan(iteration=iteration, started=spans[0].started, ended=time.monotonic(), facts=sampler.sample())
    file.append(*spans, ended)
    timeline, _ = attribute(spans, start=ended.started, end=ended.ended)
    judge(timeline)


def _rank(rank: int, role: str, task: str) -> RankSpan:
    start = time.monotonic()
    timers = Timers()
    facts: dict[str, object] = {}
    if role == "rollout":
        gauge = RolloutGauge(64)
        for step in range(_DECODE_STEPS):
            gauge.observe(running=64 - step, kv_cache_use=0.5, tokens=64 * step)
        facts |= {**gauge.facts(), **response_length_facts([6] * (_RESPONSES // 2))}
    elif role == "reward":
        latency = GraderLatency("sorting", "rule")
        for _ in range(_RESPONSES // 2):
            latency.add(1e-5)
        facts |= {"graders": [latency.facts()]}
    elif role != "advantage":
        fill = MicroBatchFill()
        for _ in range(_MICRO_BATCHES):
            with timers.time("forward"):
                pass
            if "update" in task:
                with timers.time("backward"):
                    pass
            fill.add(real_tokens=90, padded_tokens=100)
        with timers.time("optimizer"):
            pass
        facts |= fill.facts()
    return RankSpan(
        rank=rank, start=start, end=time.monotonic(), forward_seconds=timers.seconds("forward"), facts=facts
    )


def measure_step_cpu() -> list[Figure]:
    """CPU time a step, and as a share of a quick-start step."""
    with tempfile.TemporaryDirectory() as folder:
        file, sampler = SpanFile(Path(folder) / SPANS_FILE), SystemSampler()
        one_step(0, file, sampler)
        taken = []
        for number in range(1, _STEPS + 1):
            before = time.thread_time()
            one_step(number, file, sampler)
            taken.append(time.thread_time() - before)
    median = statistics.median(taken)
    spread = f"{1e3 * min(taken):.2f} to {1e3 * max(taken):.2f} ms"
    return [
        Figure(
            name="telemetry_cpu_per_step",
            value=1e3 * median,
            unit="ms",
            target=1e3 * 0.005 * QUICK_START_STEP_SECONDS,
            note=spread,
        ),
        Figure(name="telemetry_share_of_step", value=100 * median / QUICK_START_STEP_SECONDS, unit="%", target=0.5),
    ]


def write_long_run(folder: Path, iterations: int = _REPORT_ITERATIONS, ranks: int = _REPORT_RANKS) -> None:
    """A run of many ranks, with the facts a real one has."""
    file = SpanFile(folder / SPANS_FILE)
    file.append(
        RunRecord(
            run="long",
            cores_per_node=8.0,
            pools={"main": PoolRecord(ranks=ranks, accelerator="gpu")},
            prompts_per_iteration=64,
            group_size=8,
        )
    )
    facts = {
        "rollout": response_length_facts([100 + 7 * k for k in range(8)])
        | {"slots": 8, "running": [[0.0, 8], [0.5, 4], [1.0, 0]], "tokens_per_second": 812.25}
    }
    trained = {
        "tokens": 4096,
        "tokens_per_second": 4011.7,
        "micro_batch_fill": 0.913,
        "peak_memory_bytes": 7_000_000_000,
    }
    now = 0.0
    for number in range(iterations):
        started, spans = now, []
        for task, (role, upstream) in TASKS.items():
            begin, now = now, now + 0.4
            made = tuple(
                RankSpan(
                    rank=r,
                    node=f"10.0.0.{r // 8}",
                    start=begin + 1e-3,
                    end=now - 1e-3 * (r % 7),
                    forward_seconds=0.1,
                    cpu_seconds=0.3,
                    facts=facts.get(role, trained),
                )
                for r in range(ranks)
            )
            spans.append(
                TaskSpan(
                    iteration=number,
                    task=task,
                    role=role,
                    pool="main",
                    submitted=begin,
                    started=begin,
                    ended=now,
                    upstream=upstream,
                    ranks=made,
                )
            )
        file.append(*spans, IterationSpan(iteration=number, started=started, ended=now))


def report_worker(folder: Path) -> None:
    """In a process of its own, so that its peak memory is the report's: prints seconds and peak bytes."""
    before = time.monotonic()
    built = build_report(folder)
    render_text(built)
    render_html(built, folder / "report.html")
    print(
        json.dumps(
            {"seconds": time.monotonic() - before, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        )
    )


def measure_report() -> list[Figure]:
    """Spans of 1,000 iterations x 64 ranks, read, attributed and rendered in both forms."""
    with tempfile.TemporaryDirectory() as folder:
        write_long_run(Path(folder))
        command = [sys.executable, "-m", "benchmarks.telemetry", "--report-of", folder]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        size = (Path(folder) / SPANS_FILE).stat().st_size / 2**20
    figures = json.loads(output)
    return [
        Figure(name="report_1000x64", value=figures["seconds"], unit="s", target=10.0, note=f"{size:.0f} MiB of spans"),
        Figure(name="report_1000x64_memory", value=figures["bytes"] / 2**20, unit="MiB", target=1024.0),
    ]


def measure_search() -> list[Figure]:
    """The best layout for 1,024 accelerators, async depth up to 1."""
    profile = synthetic_profile(Workload(parameters=7e9, response_tokens=2048, reward="rule", accelerators=1024))
    found = search_topology(profile, 1024, max_async_depth=1, limit_seconds=60.0)
    return [Figure(name="search_1024", value=found.seconds, unit="s", target=10.0, note=f"{found.num_tried} layouts")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report_of is not None:
        report_worker(arguments.report_of)
        return 0
    return report([*measure_step_cpu(), *measure_search(), *measure_report()], arguments.json)


if __name__ == "__main__":
    sys.exit(main())
