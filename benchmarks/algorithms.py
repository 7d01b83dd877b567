"""Each algorithm on the quick-start task: sampled accuracy on held-out prompts before and after a short training.

    python -m benchmarks.algorithms [--json] [--only NAME ...] [--seeds 3] [--iterations 20]

The same steps and workers as in a run, all in this process, with one warm engine. Every algorithm starts from the
model that the supervised warm-up of its seed made, and samples 512 responses an iteration: 512 prompts for the
algorithms that need no siblings, 64 prompts with 8 responses for the others. The gain is judged by a 95 % bootstrap
interval over the held-out prompts, of each prompt's gain averaged over the seeds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from configs.environment import apply_defaults

apply_defaults()

from configs.algorithm_defaults import AlgorithmName  # noqa: E402 - the environment is read when torch is imported
from configs.load import load_config  # noqa: E402
from configs.model import ModelConfig  # noqa: E402
from configs.run import RunConfig  # noqa: E402
from resources.local_group import LocalGroup  # noqa: E402
from tasks.algorithms.evaluation import bootstrap_interval  # noqa: E402
from tasks.dynamic_sampling import rows_of  # noqa: E402
from tasks.host import use_host  # noqa: E402
from tasks.replies import call  # noqa: E402
from tasks.reward import score_rows  # noqa: E402
from tests.tasks.local_run import LocalRun, cast_here, warm_up_here  # noqa: E402

NAMES: tuple[str, ...] = tuple(name for name in get_args(AlgorithmName) if name != "distillation")
ALONE = ("ppo", "decoupled_ppo", "reinforce_plus_plus", "remax")
"""Need no siblings."""
HELD_OUT, SAMPLES = 256, 4
OVERRIDES: dict[str, tuple[str, ...]] = {
    # Meant for one optimizer step a batch: neither corrects for a policy that has moved since.
    "opo": ("algorithm.num_ppo_epochs=1",),
    "gpg": ("algorithm.num_ppo_epochs=1",),
    # At temperature 1 the greedy response is right far more often than a sampled one (0.66 against 0.09), so nearly
    # every advantage is negative and the policy is pushed apart at its first steps; samples that are a little colder
    # are nearer to their baseline, and half the rate survives what is left of it.
    "remax": (
        "algorithm.num_ppo_epochs=1",
        "rollout.sampling.temperature=0.8",
        "actor.optimizer={lr: 2e-4, schedule: cosine, total_steps: 340}",
    ),
}
"""Beside the quick start's own settings, which are two epochs of four optimizer steps for all."""


@dataclass(frozen=True)
class Line:
    """One algorithm."""

    name: str
    value: float
    """Gain in sampled accuracy, mean over seeds."""
    low: float
    high: float
    before: float
    after: float
    seconds_per_iteration: float
    ok: bool
    unit: str = "accuracy gain, its interval above"
    target: float = 0.0
    better: str = "higher"


def overrides_of(name: str, seed: int) -> tuple[str, ...]:
    """What makes the quick start one with another algorithm and seed."""
    prompts, size = ("512", "1") if name in ALONE else ("64", "8")
    return (
        f"algorithm.name={name}", f"seed={seed}", f"data.prompts_per_iteration={prompts}",
        f"rollout.group_size={size}", f"validation.num_prompts={HELD_OUT}",
        f"validation.samples_per_prompt={SAMPLES}", *OVERRIDES.get(name, ()),
    )  # fmt: skip


def config_of(name: str, seed: int) -> RunConfig:
    """The quick start with another algorithm and seed."""
    return load_config("quickstart", overrides_of(name, seed))


class Stage:
    """What all runs share: the engine, the graders, and the warmed-up model of each seed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[int, ModelConfig] = {}
        groups = cast_here(config_of("grpo", 0))  # group size 8 gives row ids room for every shape
        self.shared = {duty: groups[duty] for duty in ("rollout", "reward", "advantage")}

    def model(self, config: RunConfig) -> ModelConfig:
        """The model that training with this config's seed starts from."""
        if config.seed not in self._models:
            self._models[config.seed] = warm_up_here(config, self._folder / f"seed-{config.seed}")
        return self._models[config.seed]

    def run(self, config: RunConfig) -> LocalRun:
        """Fresh actor, critic and reference beside the shared workers."""
        worker = self.shared["rollout"].workers[0]
        worker.run_seed = config.seed + config.rollout.seed_offset
        worker.rollout, worker.data = config.rollout, config.data  # sampling is not the same for all
        groups: dict[str, LocalGroup] = cast_here(config, self.model(config), self.shared)
        run = LocalRun(config, groups)
        run.sync()
        return run

    def close(self) -> None:
        """End the grader processes."""
        self.shared["reward"].call("close")


def prompt_accuracies(run: LocalRun) -> list[float]:
    """Mean score of each held-out prompt over its samples, in the order of the prompts."""
    with use_host(run.context):
        sampled = call("rollout", "evaluate", HELD_OUT, SAMPLES, False, is_bulk=True)
        rows = rows_of(score_rows(rows_of(sampled), f"held-out-{time.monotonic()}", is_validation=True))
        found = rows.load(("scores", "group_ids"))
    scores: dict[int, list[float]] = {}
    for group, score in zip(found["group_ids"].tolist(), found["scores"].tolist(), strict=True):
        scores.setdefault(group, []).append(score)
    return [statistics.fmean(scores[group]) for group in sorted(scores)]


def measure(stage: Stage, name: str, seeds: int, iterations: int) -> Line:
    """Train `seeds` times and compare the same held-out prompts before and after."""
    before: list[list[float]] = []
    after: list[list[float]] = []
    seconds = 0.0
    for seed in range(seeds):
        run = stage.run(config_of(name, seed))
        before.append(prompt_accuracies(run))
        started = time.monotonic()
        for _ in range(iterations):
            run.iterate()
        seconds += time.monotonic() - started
        after.append(prompt_accuracies(run))
        print(
            f"{name} seed {seed}: {statistics.fmean(before[-1]):.3f} -> {statistics.fmean(after[-1]):.3f}",
            file=sys.stderr,
            flush=True,
        )
    gains = [
        statistics.fmean(b - a for a, b in zip(start, end, strict=True))
        for start, end in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
    ]
    low, high = bootstrap_interval(gains)
    return Line(
        name=f"algorithms/{name}",
        value=round(statistics.fmean(gains), 4),
        low=round(low, 4),
        high=round(high, 4),
        before=round(statistics.fmean(statistics.fmean(one) for one in before), 4),
        after=round(statistics.fmean(statistics.fmean(one) for one in after), 4),
        seconds_per_iteration=round(seconds / (seeds * iterations), 3),
        ok=low > 0.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or with --json a line each; 0 when every interval lies above 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args(arguments)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        try:
            for name in options.only:
                lines.append(measure(stage, name, options.seeds, options.iterations))
                if options.json:
                    print(json.dumps(asdict(lines[-1])), flush=True)
        finally:
            stage.close()
    if not options.json:
        print(f"{'algorithm':>30}  before   after    gain  95 % interval      s/iteration")
        for line in lines:
            numbers = f"{line.before:6.3f}  {line.after:6.3f}  {line.value:6.3f}  [{line.low:6.3f}, {line.high:6.3f}]"
            verdict = "" if line.ok else "  no gain"
            print(f"{line.name.removeprefix('algorithms/'):>30}  {numbers}  {line.seconds_per_iteration:8.2f}{verdict}")
    return 0 if all(line.ok for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
