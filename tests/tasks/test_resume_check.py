"""What a resume refuses before anything is started: a config that was edited is looked at as a new run's is."""

from collections.abc import Collection
from pathlib import Path

import pytest

from configs.load import config_digest, dump_config, load_config
from configs.problems import ConfigError
from configs.run import RunConfig
from resources.casting import stateful_duties
from resources.checkpoints import CheckpointStore, Manifest
from resources.run_directory import RunDirectory, RunDirectoryError
from tasks.resume_check import check_resume

PPO = ("algorithm.kl.refresh_every=5",)


def begun(run_dir: Path, config: RunConfig, saved: Collection[str]) -> Path:
    """The folder of a run that was begun with a config and has saved the state of some roles at iteration 10."""
    directory = RunDirectory.create(run_dir, "edited")
    directory.write_config(dump_config(config))
    directory.release()
    store = CheckpointStore(directory.checkpoints)
    staging = store.begin(10)
    for duty in saved:
        (staging / duty).mkdir()
        (staging / duty / "rank-00000.json").write_text("{}")
    store.commit(staging, Manifest(
        run_id="edited", iteration=10, policy_version=10, data_position={}, kl_coef=0.0,
        config_digest=config_digest(config), metrics_bytes=0,
    ))  # fmt: skip
    return directory.path


def edited(run: Path, config: RunConfig) -> list[str]:
    """What is said after another config was stored."""
    RunDirectory(run).write_config(dump_config(config))
    try:
        check_resume(run)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_the_config_that_the_newest_checkpoint_was_made_with_is_not_looked_at_again(run_dir: Path):
    gone = load_config("quickstart", ["algorithm.loss=no_such_module:loss"])
    check_resume(begun(run_dir, gone, ["actor", "critic"]))


def test_a_hook_a_grader_and_data_that_an_edit_names_and_that_are_not_there_are_refused_together(run_dir: Path):
    run = begun(run_dir, load_config("quickstart"), ["actor", "critic"])
    found = edited(
        run,
        load_config(
            "quickstart",
            [
                "algorithm.loss=no_such_module:loss",
                "reward.graders=[{name: g, kind: python, function: 'no_such_module:grade'}]",
                f"data.sources=[{{name: d, kind: json, path: {run_dir}/absent.jsonl}}]",
            ],
        ),
    )
    told = " ".join(found)
    assert len(found) == 3
    assert "algorithm.loss is 'no_such_module:loss'" in told
    assert "reward.graders.0.function is 'no_such_module:grade'" in told
    assert "absent.jsonl" in told


def test_an_edit_that_can_be_gone_on_with_is_not_refused(run_dir: Path):
    run = begun(run_dir, load_config("quickstart"), ["actor", "critic"])
    assert edited(run, load_config("quickstart", ["iterations=900", "actor.optimizer.lr=0.0001"])) == []


@pytest.mark.parametrize(
    ("absent", "path"), [("critic", "algorithm.name is 'ppo'"), ("reference", "algorithm.kl.refresh_every is 5")]
)
def test_a_role_that_an_edit_makes_stateful_is_refused_where_the_checkpoint_has_none(
    run_dir: Path, absent: str, path: str
):
    now = load_config("quickstart", PPO)
    held = set(stateful_duties(now)) - {absent}
    before = load_config("quickstart-grpo") if absent == "critic" else load_config("quickstart")
    [problem] = edited(begun(run_dir, before, held), now)
    assert problem.startswith(f"{path}; so the {absent} is saved with the run, and the checkpoint of iteration 10 has")


def test_what_an_edit_makes_stateless_is_not_asked_for(run_dir: Path):
    run = begun(run_dir, load_config("quickstart"), ["actor"])
    assert edited(run, load_config("quickstart-grpo")) == []


def test_a_run_that_has_saved_nothing_is_looked_at_as_a_new_one(run_dir: Path):
    directory = RunDirectory.create(run_dir, "unsaved")
    directory.write_config(dump_config(load_config("quickstart", ["algorithm.loss=no_such_module:loss"])))
    with pytest.raises(ConfigError, match="no_such_module"):
        check_resume(directory.path)
    directory.release()


def test_a_folder_without_a_run_is_refused(run_dir: Path):
    with pytest.raises(RunDirectoryError, match="is no run folder"):
        check_resume(run_dir / "none")
