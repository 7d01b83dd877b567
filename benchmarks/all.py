"""The benchmarks of `NAMES`, one table: `python -m benchmarks.all [--json] [--only NAME ...]`.

Each runs in a process of its own, so that none inherits another's threads, caches or cluster. Exit 0 when all targets
hold. The table of the algorithms takes an hour and is left to its own command, `python -m benchmarks.algorithms`.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = (
    "dispatch", "train_step", "update_settings", "rollout", "compiled_sampling", "weight_sync", "reward_loop",
    "controller_tax", "telemetry", "telemetry_on_off", "checkpoint", "servers", "async_depth", "iteration", "whatif",
)  # fmt: skip
DEADLINE_SECONDS = 1800.0


def run(name: str) -> list[dict[str, Any]]:
    """The lines of one benchmark; one line that says so when it did not end well."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [failed(name, f"took longer than {DEADLINE_SECONDS:g} s")]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return [failed(name, (ended.stderr.strip().splitlines() or ["no output"])[-1])]
    return [{**line, "benchmark": name} for line in lines]


def failed(name: str, reason: str) -> dict[str, Any]:
    """A line for a benchmark without figures."""
    return {"benchmark": name, "name": reason, "value": None, "unit": "", "target": None, "better": "", "ok": False}


def main() -> int:
    """Run, print, and say by the exit code whether every target holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in arguments.only:
        lines = run(name)
        found += lines
        if arguments.json:
            print("\n".join(json.dumps(line) for line in lines), flush=True)
    if not arguments.json:
        Console().print(_table(found))
    return 0 if all(line["ok"] for line in found) else 1


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table("benchmark", "figure", "value", "target", "ok")
    for line in lines:
        value = "-" if line["value"] is None else f"{line['value']:.4g} {line['unit']}"
        sign = {"lower": "<=", "higher": ">="}.get(line["better"], "")
        target = "-" if line["target"] is None else f"{sign} {line['target']:g}"
        table.add_row(line["benchmark"], str(line["name"]), value, target, "yes" if line["ok"] else "NO")
    return table


if __name__ == "__main__":
    sys.exit(main())
