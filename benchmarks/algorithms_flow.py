"""Each algorithm on the quick-start task through the whole flow: one seed, sampled accuracy before and after.

    python -m benchmarks.algorithms_flow [--json] [--only NAME ...] [--iterations 20]

Every run is `flows/ppo.py` with Prefect, Ray and vLLM, its supervised warm-up included; the settings are those of
`benchmarks.algorithms`, which judges the gains over three seeds. One seed gives no interval over runs, so a gain counts
when it is above two standard errors of the two accuracies (binomial, a response a trial).
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.algorithms import HELD_OUT, NAMES, SAMPLES, overrides_of
from benchmarks.figure import Figure, report
from configs.load import load_config
from flows.ppo import ppo
from tasks.api import prefect_api


def measure(folder: Path, name: str, iterations: int) -> Figure:
    """One run of one algorithm."""
    overrides = (
        *overrides_of(name, 0), f"name={name.replace('_', '-')}", f"run_dir={folder}", f"prefect.home={folder}/prefect",
        f"iterations={iterations}", "validation.every=0", "validation.at_start=true", "validation.at_end=true",
        "checkpoint.every=0",
    )  # fmt: skip
    summary = ppo(load_config("quickstart", overrides))
    before, after = (float(summary[f"sampled_accuracy_{when}"]) for when in ("before", "after"))
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / (HELD_OUT * SAMPLES))
    note = f"{before:.3f} -> {after:.3f}, {HELD_OUT} prompts x {SAMPLES}"
    return Figure(
        name=f"flow/{name}", value=after - before, unit="accuracy", target=2 * error, better="higher", note=note
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """A line an algorithm, as soon as it is known; 0 when each has gained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("quickstart", (f"prefect.home={folder}/prefect",))
        with prefect_api(config.prefect):
            codes = [report([measure(Path(folder), name, options.iterations)], options.json) for name in options.only]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
