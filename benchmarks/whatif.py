"""Predictions of the what-if against runs that were then made: another layout, more engines, larger groups.

    python -m benchmarks.whatif [--json] [--markdown] [--iterations 8] [--real] [--keep FOLDER]

Every run is the whole flow with a tiny model. The scripted engine takes a fixed time a token, so a measured run repeats
but for what the machine does besides; with --real one row is made with vLLM too. Each row predicts a run from the
spans of another one, as `callsheet whatif RUN --set ...` does. Exit 0 when all errors of scripted rows hold the target.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from configs.environment import apply_defaults

apply_defaults()

import ray  # noqa: E402 - the environment is read first

from configs.load import check_config, dump_config, load_config  # noqa: E402
from configs.run import RunConfig  # noqa: E402
from flows.ppo import ppo  # noqa: E402
from resources.ray_state import set_up_local_ray  # noqa: E402
from resources.telemetry.profile import RunProfile, measure_profile  # noqa: E402
from resources.telemetry.reader import SpanReader  # noqa: E402
from resources.telemetry.topology import measured_topology, override_topology  # noqa: E402
from resources.telemetry.whatif import predict  # noqa: E402
from tasks.api import prefect_api  # noqa: E402

TARGET = 0.15
SCRIPT = (
    "{responses: {mode: random, by_token: true, min_length: 4, max_length: 16}, seconds_per_token: 0.06}"  # s a token
)
BASE = (
    "sft=null",
    "validation.sources=[]",
    "validation.every=0",
    "checkpoint.every=0",
    "data.prompts_per_iteration=16",
    "rollout.group_size=4",
    "rollout.max_response_length=16",
    "rollout.max_running_sequences=16",
    "algorithm.num_ppo_epochs=1",
    "actor.micro_batch_size=16",
    "critic.micro_batch_size=16",
)
FUSED = {"pool": "main", "colocate": "fused", "threads": 1}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run to measure."""

    name: str
    engines: int = 0
    """Rollout ranks on a pool of their own; 0 fuses the rollout with the trained roles."""
    group_size: int = 4
    is_real: bool = False

    def config(self, folder: Path, iterations: int) -> RunConfig:
        """The run's config."""
        engine = ("rollout.kv_cache_bytes=64MiB",)
        if not self.is_real:
            engine = ("rollout.engine=scripted", f"rollout.scripted={SCRIPT}")
        base = load_config(
            "quickstart", (*BASE, *engine, f"name={self.name}", f"run_dir={folder}", f"iterations={iterations}")
        )
        data = dump_config(base)
        data["rollout"]["group_size"] = self.group_size
        data["pools"] = {"main": {"bundles": 1, "cpus_per_bundle": 2}}
        data["roles"] = {role: dict(FUSED) for role in ("actor", "critic", "reference", "rollout")}
        data["roles"]["reward"] = {"pool": "main", "workers": 1, "threads": 1}
        if self.engines:
            data["pools"]["engines"] = {"bundles": self.engines, "cpus_per_bundle": 1}
            data["roles"]["rollout"] = {"pool": "engines", "threads": 1}
        data["ray"]["num_cpus"] = 8
        return check_config(data)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="fused"),
        Layout(name="split", engines=1),
        Layout(name="two-engines", engines=2),
        Layout(name="groups-of-16", group_size=16),
        Layout(name="vllm-groups-of-4", is_real=True),
        Layout(name="vllm-groups-of-16", group_size=16, is_real=True),
    )
}
SPLIT = {"pools.engines": "1", "roles.rollout.pool": "engines", "roles.rollout.colocate": "shared"}
FUSE = {"roles.rollout.pool": "main", "roles.rollout.colocate": "fused"}
ROWS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("fused -> split", "fused", "split", SPLIT),
    ("split -> fused", "split", "fused", FUSE),
    ("1 -> 2 rollout ranks", "split", "two-engines", {"pools.engines": "2"}),
    ("2 -> 1 rollout ranks", "two-engines", "split", {"pools.engines": "1"}),
    ("group size 4 -> 16", "fused", "groups-of-16", {"rollout.group_size": "16"}),
    ("group size 16 -> 4", "groups-of-16", "fused", {"rollout.group_size": "4"}),
    ("group size 4 -> 16, vLLM", "vllm-groups-of-4", "vllm-groups-of-16", {"rollout.group_size": "16"}),
)
"""What changes, the run it is predicted from, the run it is compared with, and the change in the config's words."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prediction beside its measurement, in seconds a step."""

    what: str
    before: float
    predicted: float
    measured: float
    is_real: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured step."""
        return self.predicted / self.measured - 1.0

    @property
    def is_ok(self) -> bool:
        """Within the target; the row with the real engine is reported only."""
        return self.is_real or abs(self.error) <= TARGET

    def to_json(self) -> dict[str, Any]:
        """As every benchmark's line."""
        return {
            "name": f"whatif/{self.what}",
            "value": round(abs(self.error), 4),
            "unit": "error",
            "target": None if self.is_real else TARGET,
            "better": "lower",
            "ok": self.is_ok,
            "before_seconds": round(self.before, 3),
            "predicted_seconds": round(self.predicted, 3),
            "measured_seconds": round(self.measured, 3),
        }


def profile_of(folder: Path) -> RunProfile:
    """What a run measured."""
    reader = SpanReader(path=folder)
    return measure_profile(list(reader.iterations()), reader.run)


def measure(folder: Path, iterations: int, with_real: bool) -> list[Row]:
    """Make the runs, or take those that `folder` holds already, and compare."""
    chosen = [layout for layout in LAYOUTS.values() if with_real or not layout.is_real]
    for layout in chosen:
        if not (folder / layout.name / "spans.jsonl").exists():
            ppo(layout.config(folder, iterations))
    profiles = {layout.name: profile_of(folder / layout.name) for layout in chosen}
    rows = []
    for what, source, target, changes in ROWS:
        if source not in profiles:
            continue
        profile = profiles[source]
        predicted = predict(profile, override_topology(measured_topology(profile), changes))
        rows.append(
            Row(
                what=what,
                before=profile.measured_step_seconds,
                predicted=predicted.step_seconds,
                measured=profiles[target].measured_step_seconds,
                is_real=LAYOUTS[source].is_real,
            )
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/bottlenecks.md."""
    lines = ["| change | measured before s | predicted s | then measured s | error |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row.what} | {row.before:.2f} | {row.predicted:.2f} | {row.measured:.2f} | {100 * row.error:+.0f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a prediction; 0 when all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; those it holds are not repeated")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        scratch = partial(stack.enter_context, tempfile.TemporaryDirectory())
        folder = options.keep or Path(scratch())
        is_there = all((folder / name / "spans.jsonl").exists() for name in LAYOUTS)
        if not is_there:
            config = load_config("quickstart", (f"prefect.home={folder}/prefect",))
            stack.enter_context(prefect_api(config.prefect))
            stack.callback(ray.shutdown)
            # One cluster for all runs; the simulator counts real cores, whatever is declared here.
            set_up_local_ray()
            ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        rows = measure(folder, options.iterations, options.real)
    if options.markdown:
        print(markdown(rows))
    for row in () if options.markdown else rows:
        text = f"{row.what:>26}  {row.predicted:.2f} s predicted, {row.measured:.2f} s measured"
        error = f", {100 * row.error:+.0f} %{'' if row.is_ok else f'  missed {TARGET:.0%}'}"
        print(json.dumps(row.to_json()) if options.json else text + error)
    return 0 if all(row.is_ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
