"""The small form of the benchmarks, for CI: fails when a ratio is more than 25 % worse than the recorded one.

    python -m benchmarks.small [--json] [--only NAME ...]    # compare with benchmarks/recorded.json
    python -m benchmarks.small --record [--only NAME ...]    # write what was measured, after a change that is meant

Only ratios whose two sides run in turn in one process, or that do not depend on time at all: what else the machine does
meets both sides. A ratio that looks worse is measured up to twice more, and counts if it is worse each time. A
benchmark that does not end well, or does not print the ratios that are recorded of it, fails.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.in_a_process import run

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
UNITS_OF_NO_RATIO = ("s", "tokens/s", "MiB")


def measure(name: str) -> dict[str, dict[str, Any]]:
    """The ratios of one benchmark, by name. Raises RuntimeError when it did not end well."""
    ended = run(name, COMMANDS[name], DEADLINE_SECONDS, {**os.environ, "OMP_NUM_THREADS": "1"})
    if ended.problem:
        raise RuntimeError(f"benchmarks.{name} did not end well: {ended.problem}")
    return {f"{name}: {line['name']}": line for line in ended.lines if line["unit"] not in UNITS_OF_NO_RATIO}


def worsening(line: Mapping[str, Any], recorded: float) -> float:
    """By which share the ratio is worse than `recorded`; negative when it is better.

    >>> worsening({"value": 1.2, "better": "lower"}, 1.0)
    0.19999999999999996
    >>> worsening({"value": 0.8, "better": "higher"}, 1.0)
    0.25
    """
    return line["value"] / recorded - 1 if line["better"] == "lower" else recorded / line["value"] - 1


def worse_ones(found: Mapping[str, dict[str, Any]], recorded: Mapping[str, float]) -> list[str]:
    """Names whose ratio is worse than the bound allows; one that is no number is."""
    return [name for name, line in found.items() if not worsening(line, recorded[name]) <= MAX_WORSENING]


def differences(benchmark: str, found: Collection[str], recorded: Collection[str]) -> list[str]:
    """What makes a comparison incomplete: ratios that were recorded and are not printed any more, or the reverse."""
    own = {name for name in recorded if name.startswith(f"{benchmark}: ")}
    return [
        *(f"{name!r} is recorded and was not printed" for name in sorted(own - set(found))),
        *(f"{name!r} was printed and is not recorded" for name in sorted(set(found) - own)),
    ]


def compared(name: str, recorded: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The ratios of one benchmark, those that look worse measured again.

    Raises RuntimeError when they are not those that are recorded.
    """
    found = measure(name)
    if differ := differences(name, found, recorded):
        raise RuntimeError(f"{'; '.join(differ)} in {RECORDED.name}; mend the benchmark, or run with --record")
    for _ in range(REPEATS):
        if worse := worse_ones(found, recorded):
            again = measure(name)
            found |= {key: again[key] for key in worse}
    return found


def record(names: Collection[str], recorded: Mapping[str, float]) -> None:
    """Write what these benchmarks print now in place of all that is recorded of them."""
    kept = {name: value for name, value in recorded.items() if name.partition(": ")[0] not in names}
    measured = {key: round(line["value"], 3) for name in names for key, line in measure(name).items()}
    RECORDED.write_text(json.dumps(dict(sorted({**kept, **measured}.items())), indent=1) + "\n")


def main() -> int:
    """0 when no ratio is worse, 1 when one is, each time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    options = parser.parse_args()
    began = time.monotonic()
    recorded: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if options.record:
        record(options.only, recorded)
        return 0
    measured = {key: line for name in options.only for key, line in compared(name, recorded).items()}
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
