"""Which model a run has started from."""

from pathlib import Path

import pytest

from configs.load import load_config
from tasks.export import start_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a model in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def test_a_run_with_a_warm_up_has_started_from_what_that_published(run: Path):
    config = load_config("quickstart", ["sft.steps=2"])
    assert start_model(config, run).path == str(run / "model")
    assert start_model(config, run / "elsewhere") == config.model


@pytest.mark.parametrize("sft", ["null", "{steps: 0}", "{steps: 2, objective: reward_model}"])
def test_a_run_without_a_warm_up_has_started_from_its_config_whatever_lies_in_its_folder(sft: str, run: Path):
    config = load_config("quickstart", [f"sft={sft}"])
    assert start_model(config, run) == config.model
