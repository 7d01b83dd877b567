"""Fitting alone, and scoring a checkpoint, an export and a folder, through the real flows."""

import json
from pathlib import Path

import pytest

from configs.problems import ConfigError
from configs.run import RunConfig
from flows.cli import REFUSED
from flows.evaluation import evaluation
from flows.ppo import ppo
from flows.run_commands import resume
from flows.sft import supervised
from flows.side_commands import checkpoint_of, model_to_score, renamed
from resources.samples import read_samples_of, sample_files
from tasks.export import export_checkpoint, start_model
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

ENGINE = ("rollout.engine=huggingface", "rollout.scripted=null", "validation.samples_per_prompt=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of two iterations after a short warm-up, validated at its end."""
    config = small_config(
        *ENGINE, f"run_dir={tmp_path_factory.mktemp('runs')}", "name=trained", "iterations=2", "sft.steps=20",
        "sft.batch_size=32", "sft.optimizer.lr=1e-2", "validation.every=0",
    )  # fmt: skip
    ppo(config)
    return config


def test_a_checkpoint_and_its_export_score_as_the_run_did(trained: RunConfig):
    run = Path(trained.run_dir) / trained.name
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    checkpoint = checkpoint_of(run, None, None)
    scored = evaluation(renamed(trained, start_model(trained, run)), checkpoint)
    export_checkpoint(trained, run, Path(checkpoint), run / "export")
    exported = evaluation(renamed(trained, model_to_score(trained, None, str(run / "export"))), None)
    names = [name for name in last if name.startswith("validation/")]
    assert "validation/majority_at_2/low" in names
    for name in names:
        assert scored["metrics"][name] == exported["metrics"][name] == last[name], name
    assert json.loads((Path(scored["run"]) / "result.json").read_text())["metrics"] == scored["metrics"]
    assert scored["run"] != exported["run"]


def test_a_run_keeps_the_rows_of_each_iteration(trained: RunConfig):
    files = sample_files(Path(trained.run_dir) / trained.name / "samples")
    assert list(files) == [0, 1]
    assert {row["policy_version"] for row in read_samples_of(files[1])} == {1}


def test_fitting_alone_leaves_a_model_folder(tmp_path: Path):
    result = supervised(small_config(f"run_dir={tmp_path}", "name=fit", "sft.steps=2", "sft.batch_size=8"))
    assert (Path(result["model"]) / "model.safetensors").is_file()
    assert result["metrics"]["actor/optimizer_steps"] == 2


def test_a_folder_of_something_done_alone_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    supervised(small_config(f"run_dir={tmp_path}", "name=fit", "sft.steps=1", "sft.batch_size=8"))
    assert resume(tmp_path / "fit") == REFUSED
    assert "begin anew: call that again under another name (--set name=...)" in capsys.readouterr().err


def test_a_reward_model_without_pairs_is_refused_and_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="row 0 of source 'sorting' is no preference pair"):
        supervised(small_config(f"run_dir={tmp_path}", "name=fit", "sft.steps=1", "sft.objective=reward_model"))
    assert not (tmp_path / "fit").exists()
