"""The small form of the benchmarks, for CI: fails when a ratio is more than 25 % worse than the recorded one.

    python -m benchmarks.small [--json] [--only NAME ...]    # compare with benchmarks/recorded.json
    python -m benchmarks.small --record [--only NAME ...]    # write what was measured, after a change that is meant

Only ratios whose two sides run in turn in one process, or that do not depend on time at all: what else the machine does
meets both sides. A ratio that looks worse is measured up to twice more, and counts if it is worse each time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MAX_WORSENING = 0.25
RECORDED = Path(__file__).with_name("recorded.json")
DEADLINE_SECONDS = 180.0
REPEATS = 2
COMMANDS: dict[str, tuple[str, ...]] = {
    "train_step": ("--rounds", "9"),
    "dispatch": ("--sizes", "2", "8", "--calls", "150", "--skip-start", "--skip-data"),
    "rollout": ("--rounds", "9", "--only", "1"),
    "iteration": ("--rounds", "7"),
}
"""Benchmark -> its arguments."""


def measure(name: str) -> dict[str, dict[str, Any]]:
    """The ratios of one benchmark, by name."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *COMMANDS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment, check=False
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"benchmarks.{name} printed nothing: {ended.stderr[-2000:]}")
    return {f"{name}: {line['name']}": line for line in lines if line["unit"] not in ("s", "tokens/s", "MiB")}


def worsening(line: dict[str, Any], recorded: float) -> float:
    """By which share the ratio is worse than `recorded`; negative when it is better.

    >>> worsening({"value": 1.2, "better": "lower"}, 1.0)
    0.19999999999999996
    >>> worsening({"value": 0.8, "better": "higher"}, 1.0)
    0.25
    """
    return line["value"] / recorded - 1 if line["better"] == "lower" else recorded / line["value"] - 1


def worse_ones(found: dict[str, dict[str, Any]], recorded: dict[str, float]) -> list[str]:
    """Names whose ratio is worse than the bound allows."""
    return [name for name, line in found.items() if worsening(line, recorded[name]) > MAX_WORSENING]


def main() -> int:
    """0 when no ratio is worse, 1 when one is, each time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    options = parser.parse_args()
    began = time.monotonic()
    recorded: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    measured: dict[str, dict[str, Any]] = {}
    for name in options.only:
        found = measure(name)
        if not options.record:
            unknown = sorted(found.keys() - recorded.keys())
            if unknown:
                print(f"{unknown} are not in {RECORDED.name}; run with --record", file=sys.stderr)
                return 1
            for _ in range(REPEATS):
                if worse := worse_ones(found, recorded):
                    again = measure(name)
                    found |= {key: again[key] for key in worse}
        measured |= found
    if options.record:
        found = {**recorded, **{name: round(line["value"], 3) for name, line in measured.items()}}
        RECORDED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        return 0
    worse = worse_ones(measured, recorded)
    for name, line in measured.items():
        change = worsening(line, recorded[name])
        if options.json:
            print(
                json.dumps({"name": name, "value": line["value"], "recorded": recorded[name], "ok": name not in worse})
            )
        else:
            verdict = "WORSE" if name in worse else "ok"
            print(f"{name:66} {line['value']:7.3f}, recorded {recorded[name]:7.3f}, {change:+.0%} worse  {verdict}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
