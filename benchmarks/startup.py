"""From `callsheet train` to the first rollout, warm: imports, Ray, Prefect, workers, warm-up, first weights.

    python -m benchmarks.startup [--json] [--rounds 5]

Each round is a whole run of one iteration of the quick start in a process of its own, its Prefect database fresh; one
round before them fills the caches of files. Times are read from the run's own spans, on the clock of the machine. The
target is of the start alone; the quick start also trains a model from nothing before it (`sft`), which is told apart.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Figure, report

MAX_SECONDS = 35.0
SETTINGS = ("iterations=1", "validation.every=0", "validation.sources=[]", "checkpoint.every=0", "name=startup")
DEADLINE_SECONDS = 300.0


def run_once(folder: Path, *more: str) -> dict[str, float]:
    """Seconds from the start of the process to the first rollout's start and end, and to the end of the process."""
    began = time.monotonic()
    command = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())", "train", "quickstart"]
    for setting in (*SETTINGS, *more, f"run_dir={folder / 'runs'}", f"prefect.home={folder / 'prefect'}"):
        command += ["--set", setting]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    if ended.returncode:
        raise RuntimeError(f"callsheet train ended with {ended.returncode}: {ended.stderr[-2000:]}")
    records = [json.loads(line) for line in (folder / "runs/startup/spans.jsonl").read_text().splitlines()]
    tasks = [record for record in records if record.get("task") == "rollout"]
    first = min(tasks, key=lambda task: task["started"])
    return {
        "start": first["started"] - began,
        "end": first["ended"] - began,
        "rollout": first["ended"] - first["started"],
        "process": time.monotonic() - began,
    }


@dataclass(frozen=True, kw_only=True)
class Start:
    """Median seconds to the first rollout, and what else was seen."""

    value: float
    note: str


def measure(count: int, *more: str) -> Start:
    """`count` warm rounds and a cold one before them."""
    rounds: list[dict[str, float]] = []
    for _ in range(count + 1):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(run_once(Path(folder), *more))
    found = {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
    spread = sorted(one["start"] for one in rounds[1:])
    note = (
        f"{spread[0]:.1f} to {spread[-1]:.1f} s; the round before {rounds[0]['start']:.1f} s; the rollout itself "
        f"{found['rollout']:.2f} s, the whole process {found['process']:.1f} s"
    )
    return Start(value=found["start"], note=note)


def main() -> int:
    """Measure, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    plain = measure(options.rounds, "sft=null")
    trained = measure(options.rounds)
    name = "callsheet train to the first rollout, warm"
    return report(
        [
            Figure(name=name, value=plain.value, unit="s", target=MAX_SECONDS, note=plain.note),
            Figure(name=f"{name}, after its supervised warm-up", value=trained.value, unit="s", note=trained.note),
        ],
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
