"""The table of docs/reliability.md, measured: fault, noticed after, back after, what is lost.

    python -m tests.chaos.table [--write]

`--write` puts it into docs/reliability.md between its two marks.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from configs.environment import apply_defaults
from tests.chaos.faults import Fault, Injector
from tests.chaos.runs import assert_same_run, commit_times, events_of, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
CASES = (
    ("rollout worker killed in the rollout", Fault(iteration=1, target="rollout", step="rollout")),
    ("actor killed in its update", Fault(iteration=2, target="actor", step="actor-update")),
    ("critic killed in its update", Fault(iteration=3, target="critic", step="critic-update")),
    ("reference killed while it scores", Fault(iteration=4, target="reference", step="reference")),
    ("reward worker killed while it grades", Fault(iteration=5, target="reward", step="reward")),
    ("rollout worker killed in the weight sync", Fault(iteration=6, target="rollout", step="weight-sync")),
    ("task host killed", Fault(iteration=7, target="host learn", step="actor-update")),
    ("actor stopped (SIGSTOP)", Fault(iteration=8, target="actor", step="actor-update", number=signal.SIGSTOP)),
    ("task host stopped (SIGSTOP)", Fault(iteration=9, target="host learn", step="rollout", number=signal.SIGSTOP)),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    fault: str
    noticed: float
    back: float


def measure(folder: Path) -> list[Row]:
    """One run with all faults, one without; raises AssertionError where a bit differs."""
    from flows.ppo import ppo
    from tasks.api import prefect_api

    sections = {"iterations": 12, "prefect": {"home": str(folder / "prefect")}}
    config = tiny_config(folder, "disturbed", "split", **sections)
    times: dict[int, float] = {}
    with prefect_api(config.prefect):
        ppo(tiny_config(folder, "undisturbed", "split", **sections))
        with commit_times(times), Injector(faults=[fault for _, fault in CASES]) as injector:
            ppo(config)
    assert_same_run(folder / "disturbed", folder / "undisturbed")
    events = events_of(folder / "disturbed", "recovered")
    names = {(fault.target, fault.step, fault.number): text for text, fault in CASES}
    rows = []
    for done in injector.made:
        event = next(event for event in events if event["noticed"] >= done.at)
        noticed, back = event["noticed"] - done.at, times[event["iteration"]] - done.at
        rows.append(Row(fault=names[done.fault.target, done.fault.step, done.fault.number], noticed=noticed, back=back))
    return rows


def markdown(rows: list[Row]) -> str:
    """The table."""
    lines = ["| fault | noticed after | next good iteration after | lost |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.fault} | {row.noticed:.1f} s | {row.back:.1f} s | nothing: same bits |" for row in rows]
    load = os.getloadavg()[0]
    lines.append(f"\nMeasured on {os.cpu_count()} cores ({platform.machine()}), load average {load:.0f}, split pools.")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    apply_defaults()
    with tempfile.TemporaryDirectory() as name:
        text = markdown(measure(Path(name)))
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
