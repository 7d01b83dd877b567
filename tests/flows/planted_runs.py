"""Bottlenecks planted in real runs of the whole flow, and the verdict each must get.

`python -m tests.flows.planted_runs [--times 3] [--only WORD]` makes the runs and prints a table; each run is `ppo` on
real Ray and Prefect with a tiny model, and the verdict is the one that `callsheet report` prints.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.load import check_config, dump_config, load_config
from configs.run import RunConfig
from resources.run_directory import read_lines
from resources.telemetry.causes import Cause
from resources.telemetry.report import Report, build_report

ROOT = Path(__file__).resolve().parent.parent.parent
GRADERS = "tests.resources.telemetry.planted"
WORKERS = "tests.flows.planted_workers"
ITERATIONS = 3

BASE = (
    f"iterations={ITERATIONS}",
    "sft=null",
    "checkpoint.every=0",
    "validation.every=0",
    "validation.at_start=false",
    "validation.at_end=false",
    "data.prompts_per_iteration=64",
    "rollout.engine=scripted",
    "rollout.max_running_sequences=64",
    "algorithm.num_ppo_epochs=1",
    "algorithm.num_mini_batches=2",
    "actor.micro_batch_size=32",
    "critic.micro_batch_size=32",
)
REFERENCE_APART: dict[str, Any] = {
    "pools": {"main": {"nodes": [1], "cpus_per_bundle": 2}, "slow": {"nodes": [1]}},
    "roles": {"reference": {"pool": "slow", "colocate": "shared", "worker": f"{WORKERS}:SlowReference"}},
}
SLOW_SCORING = ("data.prompts_per_iteration=32", "actor.log_prob_micro_batch_size=8")
"""Four micro-batches for the slow reference: two seconds, as long as the grading."""
ANSWERS = {"responses": {"mode": "answer", "by_token": True}, "seconds_per_token": 0.05}
"""Six tokens each: all of a rollout's responses are equally long."""
FUSED = {"pool": "main", "colocate": "fused"}
MODEL_ROLES = ("actor", "rollout", "reference", "critic")
Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bottleneck, how it is planted, and who must be named for what."""

    name: str
    role: str
    cause: Cause
    overrides: Sequence[str] = ()
    scripted: Changes | None = field(default_factory=lambda: ANSWERS)
    """None for an engine that is not scripted."""
    pools: Changes = field(default_factory=lambda: {"main": {"nodes": [1], "cpus_per_bundle": 2}})
    roles: Changes = field(default_factory=dict)
    """Besides the four model roles fused in `main` and the reward beside them."""
    critic_model: Changes | None = None
    grader: str | None = None
    is_by_value: bool = False
    async_depth: int = 0

    def config(self, run_dir: Path, name: str, seed: int) -> RunConfig:
        """The config of one run."""
        given = () if self.scripted is None else ("rollout.scripted={}",)
        data = dump_config(
            load_config(
                "quickstart", [*BASE, *given, f"run_dir={run_dir}", f"name={name}", f"seed={seed}", *self.overrides]
            )
        )
        data["rollout"]["scripted"] = self.scripted
        data["pools"] = dict(self.pools)
        roles: dict[str, dict[str, Any]] = {role: dict(FUSED) for role in MODEL_ROLES}
        data["roles"] = roles
        data["roles"]["reward"] = {"pool": "main", "workers": 1}
        for role, changes in self.roles.items():
            data["roles"][role] = {**data["roles"][role], **changes}
        data["async_depth"] = self.async_depth
        data["code"]["import_paths"] = [str(ROOT)]
        if self.critic_model is not None:
            data["critic"]["model"] = {
                "build": "tiny",
                "shape": {**data["model"]["shape"], **self.critic_model},
            }
        if self.grader is not None:
            data["reward"]["graders"] = [{"name": "planted", "kind": "python", "function": f"{GRADERS}:{self.grader}"}]
            data["reward"]["processes"] = 2
        return check_config(data)


PLANTS: tuple[Plant, ...] = (
    Plant(
        name="nothing",
        role="none",
        cause=Cause.BALANCED,
        overrides=(
            "data.prompts_per_iteration=1024",
            "rollout.max_running_sequences=1024",
            "algorithm.num_ppo_epochs=3",
            "actor.micro_batch_size=128",
            "critic.micro_batch_size=128",
            "algorithm.num_mini_batches=4",
        ),
        scripted={"responses": {"mode": "answer", "by_token": True}, "seconds_per_token": 0.6},
    ),
    Plant(name="a grader that sleeps", role="reward", cause=Cause.SLOW_GRADER, grader="sleeps"),
    Plant(
        name="one grader call in 50 that sleeps long",
        role="reward",
        cause=Cause.RARE_SLOW_GRADER,
        grader="rarely_sleeps",
        overrides=("data.prompts_per_iteration=128", "rollout.max_running_sequences=128"),
    ),
    Plant(
        name="one very long response",
        role="rollout",
        cause=Cause.LONG_TAIL,
        overrides=("rollout.max_response_length=48",),
        scripted={
            "responses": {"mode": "random", "by_token": True, "lengths": "one_long", "min_length": 6, "max_length": 48},
            "seconds_per_token": 0.08,
        },
    ),
    Plant(
        name="a slow rank in the actor group",
        role="actor",
        cause=Cause.SLOW_RANK,
        pools={"main": {"nodes": [2], "cpus_per_bundle": 2}},
        roles={"actor": {"worker": f"{WORKERS}:SlowRankActor"}},
        overrides=("actor.micro_batch_size=8",),
    ),
    Plant(
        name="a critic three times the actor's size",
        role="critic",
        cause=Cause.HEAVY_CRITIC,
        overrides=(
            "data.prompts_per_iteration=512",
            "rollout.max_running_sequences=512",
            "algorithm.num_ppo_epochs=2",
            "actor.micro_batch_size=128",
            "critic.micro_batch_size=128",
        ),
        critic_model={"num_layers": 6},
    ),
    Plant(
        name="a reference on a slow pool",
        role="reference",
        cause=Cause.SLOW_REFERENCE,
        **REFERENCE_APART,
        overrides=("actor.log_prob_micro_batch_size=16",),
    ),
    Plant(
        name="a slow reference beside an actor that scores nothing",
        role="reference",
        cause=Cause.SLOW_REFERENCE,
        **REFERENCE_APART,
        overrides=("actor.log_prob_micro_batch_size=16", "algorithm.num_mini_batches=1", "algorithm.kl.place=loss"),
    ),
    Plant(name="a driver that serialises", role="controller", cause=Cause.SERIALISE, is_by_value=True),
    Plant(
        name="too small a KV cache",
        role="rollout",
        cause=Cause.KV_CACHE,
        overrides=(
            "rollout.engine=vllm",
            "rollout.max_response_length=56",
            "rollout.num_gpu_blocks_override=9",
            "data.prompts_per_iteration=384",
            "rollout.enable_prefix_caching=false",
        ),
        scripted=None,
    ),
    Plant(
        name="an engine slower than the training it runs ahead of",
        role="rollout",
        cause=Cause.COMPUTE_BOUND,
        async_depth=1,
        pools={"main": {"nodes": [1], "cpus_per_bundle": 2}, "engines": {"nodes": [1]}},
        roles={"rollout": {"pool": "engines", "colocate": "shared"}},
        scripted={"responses": {"mode": "answer", "by_token": True}, "seconds_per_token": 0.7},
    ),
)

PAIR: tuple[Plant, Plant] = (
    Plant(
        name="a grader in the process of the model roles",
        role="reward",
        cause=Cause.SLOW_GRADER,
        grader="sleeps",
        roles={"reward": {"colocate": "fused"}, "reference": {"worker": f"{WORKERS}:SlowReference"}},
        overrides=SLOW_SCORING,
    ),
    Plant(
        name="the same grader in a pool of its own",
        role="none",
        cause=Cause.BALANCED,
        grader="sleeps",
        pools={"main": {"nodes": [1], "cpus_per_bundle": 2}, "graders": {"nodes": [1]}},
        roles={"reward": {"pool": "graders"}, "reference": {"worker": f"{WORKERS}:SlowReference"}},
        overrides=SLOW_SCORING,
    ),
)
"""Two lines of config apart: in the main pool scoring waits for grading, in its own it goes on beside it."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a planted run was found to be."""

    plant: Plant
    report: Report
    folder: Path
    seconds: float

    @property
    def is_right(self) -> bool:
        verdict = self.report.verdict
        return verdict is not None and (verdict.role, verdict.cause) == (self.plant.role, self.plant.cause)

    @property
    def error_of_sums(self) -> float:
        """Largest gap between the sum of a role's parts and the wall clock from commit to commit, as a share of that.

        Over all iterations but the first, which has no commit before it, and those in which the role had no task: the
        last iteration of a run that samples ahead has no rollout.
        """
        lines = list(read_lines(self.folder / "metrics.jsonl"))[1:]
        totals: dict[str, float] = {}
        clocks: dict[str, float] = {}
        for line, summary in zip(lines, self.report.complete[1:], strict=True):
            for role in summary.times.roles:
                totals[role.role] = totals.get(role.role, 0.0) + role.total
                clocks[role.role] = clocks.get(role.role, 0.0) + line["time/iteration"]
        return max(abs(total - clocks[role]) / clocks[role] for role, total in totals.items())


def run_plant(plant: Plant, run_dir: Path, seed: int) -> Judged:
    """One run, to its end, and its report. Ray and Prefect must be there."""
    from flows.ppo import ppo
    from tests.flows.planted_flow import ppo_by_value

    name = f"{'-'.join(plant.name.lower().replace(chr(39), '').split())}-{seed}"
    config = plant.config(run_dir, name, seed)
    started = time.monotonic()
    flow: Callable[[RunConfig], Any] = ppo_by_value if plant.is_by_value else ppo
    flow(config)
    folder = run_dir / name
    return Judged(plant=plant, report=build_report(folder), folder=folder, seconds=time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen plants; 0 if every verdict was right."""
    import os

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default="", help="words of plants' names, ; between them, in this order")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; a temporary one when left out")
    asked = parser.parse_args(arguments)
    from configs.environment import apply_defaults

    apply_defaults()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    from tests.harness import cluster_and_server

    wrong = 0
    chosen = {
        plant.name: plant for word in asked.only.split(";") for plant in (*PLANTS, *PAIR) if word in plant.name
    }.values()
    with tempfile.TemporaryDirectory() as scratch, cluster_and_server():
        for plant in chosen:
            for seed in range(asked.first_seed, asked.first_seed + asked.times):
                judged = run_plant(plant, asked.keep or Path(scratch), seed)
                wrong += not judged.is_right
                print(_row(judged, seed), flush=True)
    return 1 if wrong else 0


def _row(judged: Judged, seed: int) -> str:
    verdict = judged.report.verdict
    line = verdict.line if verdict is not None else "no verdict"
    mark = "right" if judged.is_right else "WRONG"
    error = f"{100 * judged.error_of_sums:.2f} %"
    return f"| {judged.plant.name} | {seed} | {mark} | {line} | {error} | {judged.seconds:.0f} s |"


if __name__ == "__main__":
    sys.exit(main())
