"""What sampling one iteration ahead is worth: seconds an iteration at async_depth 0 and 1, through the whole flow.

    python -m benchmarks.async_depth [--json] [--iterations 12] [--real]

Two pools, one thread a role in both. The scripted engine answers with delays, chosen so that a rollout takes as long
as the rest of an iteration (measured first, without delays): the best case for running ahead is then a factor of 2.
With --real both depths also train the quick start with vLLM for 40 iterations, and their final accuracy is compared.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

from configs.load import check_config, dump_config, load_config  # noqa: E402 - the environment is read first
from configs.run import RunConfig  # noqa: E402
from flows.ppo import ppo  # noqa: E402
from resources.run_directory import read_lines  # noqa: E402
from tasks.api import prefect_api  # noqa: E402

TARGET = 1.3
WARM_UP = 2
"""First iterations of a run, which are left out of its median."""
TOKENS = 6
"""Of every scripted answer: five digits and the stop token."""
ACCURACY_SLACK = 0.08
REAL_ITERATIONS = 40


def config_of(folder: Path, name: str, depth: int, overrides: Sequence[str]) -> RunConfig:
    """The quick start on a pool for the engine and one for everything else."""
    base = load_config("quickstart", (f"name={name}", f"run_dir={folder}", *overrides))
    data = dump_config(base)
    data["pools"] = {
        "train": {"bundles": 1, "cpus_per_bundle": 2},
        "engines": {"bundles": 1, "cpus_per_bundle": 1},
    }
    trained = {"pool": "train", "colocate": "fused", "workers": 1, "threads": 1}
    data["roles"] = {
        "actor": trained,
        "critic": trained,
        "reference": trained,
        "reward": {"pool": "train", "workers": 1, "threads": 1},
        "rollout": {"pool": "engines", "workers": 1, "threads": 1},
    }
    data["async_depth"] = depth
    data["ray"]["num_cpus"] = 4
    return check_config(data)


def scripted(folder: Path, name: str, depth: int, iterations: int, seconds_per_token: float) -> list[float]:
    """Seconds of each iteration of a run with the scripted engine."""
    engine = f"rollout.scripted={{responses: {{mode: answer}}, seconds_per_token: {seconds_per_token}}}"
    overrides = (
        "rollout.engine=scripted", engine, f"iterations={iterations}", "sft=null", "validation.sources=[]",
        "validation.every=0", "checkpoint.every=0", "data.prompts_per_iteration=128",
    )  # fmt: skip
    config = config_of(folder, name, depth, overrides)
    ppo(config)
    return [line["time/iteration"] for line in read_lines(folder / name / "metrics.jsonl")][WARM_UP:]


def accuracy(folder: Path, name: str, depth: int) -> tuple[float, float]:
    """(sampled accuracy after training, median seconds an iteration) with the real engine."""
    config = config_of(folder, name, depth, (f"iterations={REAL_ITERATIONS}", "validation.samples_per_prompt=4"))
    summary = ppo(config)
    times = [line["time/iteration"] for line in read_lines(folder / name / "metrics.jsonl")][WARM_UP:]
    return float(summary["sampled_accuracy_after"]), statistics.median(times)


def measure(folder: Path, iterations: int, with_real: bool) -> list[Figure]:
    """Alternate the depths, so that a change of the machine's speed meets both."""
    bare = statistics.median(scripted(folder, "bare", 0, WARM_UP + 4, 0.0))
    per_token = bare / TOKENS
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for half in range(2):
        for depth in (0, 1):
            seconds[depth] += scripted(folder, f"depth-{depth}-{half}", depth, WARM_UP + iterations // 2, per_token)
    ratio = statistics.median(seconds[0]) / statistics.median(seconds[1])
    figures = [
        Figure(name="async_depth/bare_iteration", value=round(bare, 4), unit="s"),
        *(
            Figure(
                name=f"async_depth/iteration_depth_{depth}",
                value=round(statistics.median(found), 4),
                unit="s",
                note=f"{min(found):.4f} to {max(found):.4f}",
            )
            for depth, found in seconds.items()
        ),
        Figure(name="async_depth/speed_up", value=round(ratio, 3), unit="x", target=TARGET, better="higher"),
    ]
    if with_real:
        (accuracy_0, seconds_0), (accuracy_1, seconds_1) = (
            accuracy(folder, f"real-{depth}", depth) for depth in (0, 1)
        )
        lost, speed = round(accuracy_0 - accuracy_1, 4), round(seconds_0 / seconds_1, 3)
        figures += [
            Figure(name="async_depth/accuracy_lost", value=lost, unit="accuracy", target=ACCURACY_SLACK),
            Figure(name="async_depth/real_speed_up", value=speed, unit="x", better="higher"),
        ]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a figure; 0 when all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("quickstart", (f"prefect.home={folder}/prefect",))
        with prefect_api(config.prefect):
            figures = measure(Path(folder), options.iterations, options.real)
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
