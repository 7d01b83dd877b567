"""What changes beside the weights while a run goes on, through the whole flow: whose turn it is, how scores scale."""

from pathlib import Path

import pytest
import yaml

from flows.ppo import ppo
from resources.checkpoints import CheckpointStore
from resources.run_directory import read_lines
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

ROWS = 32


def test_a_critic_warms_up_alone_and_the_scale_of_scores_goes_on_after_a_resume(tmp_path: Path):
    config = small_config(
        f"run_dir={tmp_path}", "name=warm", "iterations=2", "sft=null", "checkpoint.asynchronous=false",
        "checkpoint.every=1", "checkpoint.keep=-1", "validation.every=0", "validation.at_start=false",
        "validation.at_end=false", "algorithm.critic_warmup_iterations=1", "reward.normalise=true",
    )  # fmt: skip
    run = tmp_path / "warm"
    ppo(config)
    first, second = read_lines(run / "metrics.jsonl")
    assert "actor/optimizer_steps" not in first
    assert first["critic/optimizer_steps"] == second["critic/optimizer_steps"] == second["actor/optimizer_steps"] == 4

    stored = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**stored, "iterations": 3}))
    ppo(config, str(run))
    third = list(read_lines(run / "metrics.jsonl"))[2]
    scales = [CheckpointStore(run / "checkpoints").read(n).state["parts"]["reward"] for n in (1, 2, 3)]
    assert [scale["count"] for scale in scales] == [ROWS, 2 * ROWS, 3 * ROWS]
    deviation = (scales[2]["squares"] / (3 * ROWS)) ** 0.5
    assert third["reward/shaped_score_mean"] == pytest.approx(third["reward/score_mean"] / deviation, rel=1e-5)
