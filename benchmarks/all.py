"""The benchmarks of `COMMANDS`, one table: `python -m benchmarks.all [--json] [--only NAME ...]`.

Each runs in a process of its own, so that none inherits another's threads, caches or cluster; its lines are printed as
it ends, the table at the end. Exit 0 when all targets hold and every benchmark ended well. Left to their own commands:

    python -m benchmarks.growth --only iterations    a quarter of an hour for 2,000 of them, and of fewer no memory can
                                                     be told from the warm-up
    python -m benchmarks.peers                       TRL and verl have environments of their own (make bench-peers)
    python -m benchmarks.quickstart                  whole runs of three seeds, a quarter of an hour
    python -m benchmarks.algorithms                  an hour; and benchmarks.algorithms_flow
    python -m benchmarks.scaling                     measures nothing: it carries figures to larger machines
    benchmarks/gpu_check.sh                          needs a GPU
"""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arithmetic import FASTEST
from benchmarks.figure import text_of
from benchmarks.in_a_process import run

COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "dispatch": ((),),
    "train_step": ((),),
    "update_settings": ((),),
    "rollout": ((),),
    "compiled_sampling": ((),),
    "weight_sync": ((),),
    "reward_loop": ((),),
    "controller_tax": ((),),
    "telemetry": ((),),
    "telemetry_on_off": ((),),
    "checkpoint": ((),),
    "servers": ((),),
    "async_depth": ((),),
    "iteration": (
        (),
        ("--model", "smollm2", "--keep-memory"),
        ("--model", "smollm2", "--keep-memory", "--tokens", "128"),
        *([("--model", "smollm2", "--keep-memory", "--dtype", FASTEST)] if FASTEST == "bfloat16" else []),
    ),
    "startup": ((),),
    "growth": (("--only", "work", "--no-plots"), ("--only", "ranks", "--counts", "2", "8", "64", "--no-plots")),
    "whatif": ((),),
}
"""Benchmark -> its runs, each by its arguments; those in bfloat16 where the CPU has it."""
DEADLINE_SECONDS = 3600.0
"""Of one run."""


def lines_of(name: str, arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    """The lines of one run, and one that says so when it did not end well."""
    ended = run(name, arguments, DEADLINE_SECONDS)
    lines = [{**line, "benchmark": name} for line in ended.lines]
    return [*lines, failed(name, arguments, ended.problem)] if ended.problem else lines


def failed(name: str, arguments: tuple[str, ...], reason: str) -> dict[str, Any]:
    """A line without a figure."""
    said = f"{' '.join(arguments)}: {reason}" if arguments else reason
    return {"benchmark": name, "name": said, "value": None, "unit": "", "target": None, "better": "", "ok": False}


def main() -> int:
    """Run, print, and say by the exit code whether every target holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in options.only:
        for arguments in COMMANDS[name]:
            lines = lines_of(name, arguments)
            found += lines
            for line in lines:
                print(json.dumps(line) if options.json else f"{name}: {text_of(line)}", flush=True)
    if not options.json:
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
