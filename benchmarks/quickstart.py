"""The quick start as a user runs it, for several seeds: what it learns, how long it takes, how much memory it needs.

    python -m benchmarks.quickstart [--preset quickstart-grpo] [--seeds 0 1 2] [--json]

Each seed is one `callsheet train PRESET --set seed=N --json` on the embedded default. The memory is the proportional
set size (PSS) of every process that the run started, Ray and the Prefect server included, added up every two seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figure import Figure, report
from configs.load import load_config

MAX_BEFORE = 0.2
MIN_SAMPLED = 0.75
MIN_SAMPLED_ANY = 0.65
MIN_GREEDY = 0.85
MIN_EXPLAINED_VARIANCE = 0.3
MAX_ITERATIONS = 80
MAX_SECONDS = 240.0
MAX_BYTES = 6 * 2**30
DEADLINE_SECONDS = 900.0
MARK = "CALLSHEET_BENCHMARK"


def train(preset: str, seed: int) -> dict[str, Any]:
    """One run in a folder of its own; its last JSON line, with the wall seconds and the largest PSS in bytes."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"seed={seed}", f"run_dir={folder}", f"name={preset}-{seed}", f"prefect.home={folder}/prefect"]
        command = [str(Path(sys.executable).with_name("callsheet")), "train", preset, "--json"]
        for setting in settings:
            command += ["--set", setting]
        begun = time.monotonic()
        process = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.poll() is None:
            if time.monotonic() - begun > DEADLINE_SECONDS:
                process.terminate()
                raise SystemExit(f"{preset} with seed {seed} took longer than {DEADLINE_SECONDS:g} s")
            peak = max(peak, proportional_bytes(mark))
            time.sleep(2.0)
        seconds = time.monotonic() - begun
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{preset} with seed {seed} ended with exit code {process.returncode}: {lines[-1:]}")
    return {**json.loads(lines[-1]), "wall_seconds": seconds, "pss_bytes": peak, "seed": seed}


def proportional_bytes(mark: str) -> int:
    """PSS of all processes that carry the mark in their environment; one that ends meanwhile counts 0."""
    total = 0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def figures_of(preset: str, runs: list[dict[str, Any]]) -> list[Figure]:
    """Medians over the seeds against the bars, and the worst seed."""

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def seeds(key: str) -> str:
        return "seeds " + ", ".join(f"{run[key]:.3g}" for run in runs)

    def figure(name: str, value: float, unit: str, key: str, **target: Any) -> Figure:
        return Figure(name=f"{preset}/{name}", value=value, unit=unit, note=seeds(key), **target)

    before, after, greedy = "sampled_accuracy_before", "sampled_accuracy_after", "accuracy_after"
    worst = min(run[after] for run in runs)
    found = [
        figure("sampled_before", max(run[before] for run in runs), "share", before, target=MAX_BEFORE),
        figure("sampled_after", median(after), "share", after, target=MIN_SAMPLED, better="higher"),
        figure("sampled_after_worst", worst, "share", after, target=MIN_SAMPLED_ANY, better="higher"),
        figure("greedy_after", median(greedy), "share", greedy, target=MIN_GREEDY, better="higher"),
        figure("kl_to_reference", median("kl_to_reference"), "nats", "kl_to_reference"),
        figure("iterations", median("iterations"), "", "iterations", target=MAX_ITERATIONS),
        figure("wall_seconds", median("wall_seconds"), "s", "wall_seconds", target=MAX_SECONDS),
        figure("pss", max(run["pss_bytes"] for run in runs), "B", "pss_bytes", target=MAX_BYTES),
    ]
    if load_config(preset).algorithm.needs_critic:
        key = "explained_variance"
        found.append(figure(key, median(key), "share", key, target=MIN_EXPLAINED_VARIANCE, better="higher"))
    return found


def main() -> int:
    """Exit code 0 when every bar holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        runs.append(train(options.preset, seed))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    return report(figures_of(options.preset, runs), options.json)


if __name__ == "__main__":
    sys.exit(main())
