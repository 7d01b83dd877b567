"""What a checkpoint says of the config it was made with."""

from pathlib import Path

import pytest

from configs.load import config_digest, load_config
from resources.checkpoints import Manifest
from resources.run_directory import RunDirectory, read_lines
from tasks.manifests import tell_other_config
from tasks.run_folder import open_directory


def manifest(digest: str) -> Manifest:
    return Manifest(
        run_id="run",
        iteration=7,
        policy_version=7,
        data_position={},
        kl_coef=0.0,
        config_digest=digest,
        metrics_bytes=0,
    )


def test_a_run_that_goes_on_with_the_config_it_stored_is_told_of_nothing(run_dir: Path):
    config = load_config("quickstart", [f"run_dir={run_dir}", "name=same"])
    _, directory = open_directory(config, None)
    directory.release()
    stored, directory = open_directory(config, run_dir / "same")
    tell_other_config(directory, stored, manifest(config_digest(config)))
    assert [line["kind"] for line in read_lines(directory.events)] == ["created"]
    directory.release()


def test_a_run_that_goes_on_with_another_config_says_so(run_dir: Path, caplog: pytest.LogCaptureFixture):
    before, now = (load_config("quickstart", [f"actor.optimizer.lr={lr}"]) for lr in (1e-3, 1e-4))
    directory = RunDirectory.create(run_dir, "edited")
    tell_other_config(directory, now, manifest(config_digest(before)))
    [event] = read_lines(directory.events)
    assert (event["kind"], event["iteration"]) == ("config-changed", 7)
    assert f"{directory.path}/config.yaml is not the config that the checkpoint of iteration 7" in caplog.text
