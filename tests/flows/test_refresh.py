"""A reference that is refreshed, through the whole flow."""

from pathlib import Path

import pytest

from flows.ppo import ppo
from resources.run_directory import read_lines
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]


def test_a_refreshed_reference_is_a_step_of_the_run_and_part_of_its_checkpoint(tmp_path: Path):
    config = small_config(
        f"run_dir={tmp_path}", "name=refreshed", "iterations=2", "sft=null", "checkpoint.asynchronous=false",
        "validation.every=0", "validation.at_start=false", "validation.at_end=false", "algorithm.name=grpo",
        "algorithm.kl.coef=0.1", "algorithm.kl.refresh_every=1",
    )  # fmt: skip
    assert ppo(config)["iterations"] == 2
    run = tmp_path / "refreshed"
    steps = [span["task"] for span in read_lines(run / "spans.jsonl") if "task" in span]
    assert steps.count("refresh-reference") == 2
    # What the second update started from is what the reference became, so there is no distance yet.
    distances = [line["actor/reference_kl"] for line in read_lines(run / "metrics.jsonl")]
    assert distances == pytest.approx([0.0, 0.0], abs=1e-6)
    saved = run / "checkpoints" / "iteration-000002"
    assert {path.name for path in saved.iterdir() if path.is_dir()} >= {"actor", "reference"}
