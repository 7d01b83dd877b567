"""The quick start's steps with telemetry and without it.

    python -m benchmarks.telemetry_on_off [--json] [--iterations 20]

`telemetry.enabled` is true and false in turn, two runs each. What telemetry costs by itself (benchmarks/telemetry.py)
is far below what two runs differ by; this shows that nothing else hangs on the switch.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

from configs.load import load_config  # noqa: E402 - the environment is read first
from flows.ppo import ppo  # noqa: E402
from resources.run_directory import read_lines  # noqa: E402
from tasks.api import prefect_api  # noqa: E402

WARM_UP = 2
"""First iterations of a run, which are left out."""
ORDER = (True, False, False, True)


def run_once(folder: Path, name: str, is_on: bool, iterations: int) -> list[float]:
    """Seconds of each iteration of a run."""
    overrides = (
        f"name={name}", f"run_dir={folder}", f"prefect.home={folder}/prefect", f"iterations={iterations + WARM_UP}",
        f"telemetry.enabled={str(is_on).lower()}", "sft=null", "validation.sources=[]", "validation.every=0",
        "checkpoint.every=0",
    )  # fmt: skip
    config = load_config("quickstart", overrides)
    with prefect_api(config.prefect):
        ppo(config)
    return [line["time/iteration"] for line in read_lines(folder / name / "metrics.jsonl")][WARM_UP:]


def measure(iterations: int) -> list[Figure]:
    """Median step with and without, each with the middle half of its steps, and their ratio."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number, is_on in enumerate(ORDER):
            seconds[is_on] += run_once(Path(folder), f"{'on' if is_on else 'off'}-{number}", is_on, iterations)
    figures = []
    for is_on, found in seconds.items():
        low, middle, high = statistics.quantiles(found, n=4)
        name, note = f"quick_start_step_{'on' if is_on else 'off'}", f"middle half {low:.3f} to {high:.3f} s"
        figures.append(Figure(name=name, value=middle, unit="s", note=f"{note}, {len(found)} steps"))
    on, off = figures
    return [*figures, Figure(name="on_against_off", value=on.value / off.value, unit="x")]


def main() -> int:
    """Print a line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    return report(measure(options.iterations), options.json)


if __name__ == "__main__":
    sys.exit(main())
