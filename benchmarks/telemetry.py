"""Telemetry's own cost: CPU per step, a long run's report, a search over 1,024 accelerators.

`python -m benchmarks.telemetry [--json]`. The step is that of `benchmarks/telemetry_step.py`; seconds of report and
search are medians of five.
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
from configs.environment import apply_defaults
from resources.telemetry.html_report import render_html
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from resources.telemetry.report import build_report
from resources.telemetry.rollout_gauge import response_length_facts
from resources.telemetry.search import search_topology
from resources.telemetry.spans import IterationSpan, PoolRecord, RankSpan, RunRecord, TaskSpan
from resources.telemetry.study import Workload, synthetic_profile
from resources.telemetry.text_report import render_text

_REPEATS = 5
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
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
            for _ in range(_REPEATS)
        ]
        size = (Path(folder) / SPANS_FILE).stat().st_size / 2**20
    seconds, held = (sorted(one[name] for one in found) for name in ("seconds", "bytes"))
    note = f"{seconds[0]:.1f} to {seconds[-1]:.1f} s; {size:.0f} MiB of spans"
    return [
        Figure(name="report_1000x64", value=statistics.median(seconds), unit="s", target=10.0, note=note),
        Figure(name="report_1000x64_memory", value=held[-1] / 2**20, unit="MiB", target=1024.0),
    ]


def measure_search() -> list[Figure]:
    """The best layout for 1,024 accelerators, async depth up to 1."""
    profile = synthetic_profile(Workload(parameters=7e9, response_tokens=2048, reward="rule", accelerators=1024))
    found = [search_topology(profile, 1024, max_async_depth=1, limit_seconds=60.0) for _ in range(_REPEATS)]
    seconds = sorted(one.seconds for one in found)
    note = f"{seconds[0]:.2f} to {seconds[-1]:.2f} s; {found[0].num_tried} layouts"
    return [Figure(name="search_1024", value=statistics.median(seconds), unit="s", target=10.0, note=note)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report_of is not None:
        report_worker(arguments.report_of)
        return 0
    apply_defaults()
    from benchmarks.telemetry_step import measure_step_cpu  # torch and Prefect, which no report needs

    return report([*measure_step_cpu(), *measure_search(), *measure_report()], arguments.json)


if __name__ == "__main__":
    sys.exit(main())
