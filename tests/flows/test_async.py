"""Rollouts that run ahead of the update, through the whole flow on two pools."""

import json
from pathlib import Path

import pytest

from configs.load import check_config, dump_config
from configs.run import RunConfig
from flows.ppo import ppo
from resources.run_directory import read_lines
from resources.samples import read_samples_of, sample_files
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]


def two_pools(run_dir: Path, name: str, depth: int) -> RunConfig:
    """An engine beside everything else; few prompts, so that the second epoch begins while rollouts run ahead."""
    data = dump_config(
        small_config(
            f"name={name}", f"run_dir={run_dir}", "iterations=5", "sft=null", "checkpoint.every=0",
            "validation.every=0", "validation.at_start=false", "validation.at_end=false",
            "data.sources=[{name: sorting, kind: sorting, size: 20, options: {num_digits: 5}}]",
        )
    )  # fmt: skip
    data["pools"] = {"train": {"bundles": 1, "cpus_per_bundle": 2}, "engines": {"bundles": 1, "cpus_per_bundle": 1}}
    fused = {"pool": "train", "colocate": "fused", "workers": 1, "threads": 1}
    data["roles"] = dict.fromkeys(("actor", "critic", "reference"), fused)
    data["roles"] |= {"reward": {"pool": "train"}, "rollout": {"pool": "engines", "threads": 1}}
    data["async_depth"] = depth
    return check_config(data)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of five iterations at depth 2."""
    config = two_pools(tmp_path_factory.mktemp("runs"), "ahead", 2)
    assert ppo(config)["iterations"] == 5
    return Path(config.run_dir) / config.name


def test_rows_are_as_old_as_the_depth_and_no_older(ahead: Path):
    lines = list(read_lines(ahead / "metrics.jsonl"))
    assert [line["rollout/staleness"] for line in lines] == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert [line["rollout/staleness/max"] for line in lines] == [0.0, 1.0, 2.0, 2.0, 2.0]


def test_stale_rows_are_corrected_unless_the_config_says_otherwise(ahead: Path):
    lines = list(read_lines(ahead / "metrics.jsonl"))
    assert all("rollout/correction_weight" in line for line in lines)


def test_every_prompt_comes_in_its_turn_over_the_end_of_an_epoch(ahead: Path):
    asked = [
        sorted({row["group_id"] for row in read_samples_of(path)}) for path in sample_files(ahead / "samples").values()
    ]
    assert asked == [list(range(8 * number, 8 * number + 8)) for number in range(5)]


def test_the_rollout_of_the_next_iteration_runs_beside_the_update(ahead: Path):
    spans = [json.loads(line) for line in (ahead / "spans.jsonl").read_text().splitlines()]
    rollouts = [span for span in spans if span.get("task") == "rollout"]
    # Three in the first iteration (its own and two ahead), one in each of the next two, none after that.
    assert [sum(span["iteration"] == number for span in rollouts) for number in range(5)] == [3, 1, 1, 0, 0]
