"""Whose folder a run goes on with, what is left of one that is refused, and which config is looked at."""

import sys
from pathlib import Path

import pytest

from configs.load import dump_config, load_config
from configs.problems import ConfigError
from configs.run import RunConfig
from resources.run_directory import SIDE_RUN, STARTED, RunDirectory, RunDirectoryError, read_lines
from tasks.prepare import check_before, open_run
from tasks.run_folder import open_directory, run_folder
from tasks.session import DoesNotFitError

Environment = pytest.MonkeyPatch


def config_of(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config("quickstart-grpo", [f"run_dir={run_dir}", "name=demo", *overrides])


def in_flow_run(environment: Environment, flow_run: str, run_count: int = 1) -> None:
    """As in a flow run that Prefect has started so many times."""
    environment.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", flow_run)
    environment.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(run_count))


def opened(config: RunConfig, resume: str | None) -> None:
    """Begin the run, or go on with it."""
    with open_run(config, resume):
        raise AssertionError("it is refused")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_flow_run_that_is_run_again_goes_on_with_the_folder_that_it_made(run_dir: Path, monkeypatch: Environment):
    in_flow_run(monkeypatch, "mine")
    _, directory = open_directory(config_of(run_dir), None)
    assert [(line["kind"], line["flow_run"]) for line in read_lines(directory.events)] == [("created", "mine")]
    in_flow_run(monkeypatch, "mine", 2)
    with pytest.raises(RunDirectoryError, match="demo is in use by process"):  # it was opened, and not made
        opened(config_of(run_dir), None)
    directory.release()


def test_a_flow_run_that_is_run_again_does_not_take_over_the_folder_of_another(run_dir: Path, monkeypatch: Environment):
    in_flow_run(monkeypatch, "of-last-week")
    _, directory = open_directory(config_of(run_dir, "seed=7"), None)
    directory.event(STARTED, iteration=0, flow_run="of-last-week")
    directory.release()
    before = files_in(run_dir)
    in_flow_run(monkeypatch, "mine", 2)
    with pytest.raises(RunDirectoryError, match=r"demo exists; resume it \(callsheet"):
        opened(config_of(run_dir), None)
    assert files_in(run_dir) == before


def test_what_was_done_alone_is_resumed_by_no_way_in(run_dir: Path):
    _, directory = open_directory(config_of(run_dir), None)
    directory.event(SIDE_RUN)
    directory.release()
    with pytest.raises(RunDirectoryError, match="`callsheet sft` or `evaluate`, which begin anew: call that again"):
        opened(config_of(run_dir), str(directory.path))


def refuse(config: RunConfig, resume: Path | None = None, has_begun: bool = False, more: str | None = None) -> None:
    """A run that is refused, before or after it has begun, with a file of the user's in its folder."""

    def begin() -> None:
        with run_folder(config, resume) as (_, directory):
            if has_begun:
                directory.event(STARTED)
            if more is not None:
                (directory.path / more).write_text("mine")
            raise DoesNotFitError("the plan does not fit")

    with pytest.raises(DoesNotFitError):
        begin()


def test_a_run_that_is_refused_before_it_has_begun_leaves_its_name_to_the_corrected_config(run_dir: Path):
    refuse(config_of(run_dir))
    assert list(run_dir.iterdir()) == []
    with run_folder(config_of(run_dir, "seed=7"), None) as (config, directory):
        directory.event(STARTED)
    assert config.seed == 7
    assert (run_dir / "demo" / "config.yaml").is_file()


def test_the_folder_of_a_run_that_has_begun_stays(run_dir: Path):
    refuse(config_of(run_dir), has_begun=True)
    assert load_config(run_dir / "demo" / "config.yaml") == config_of(run_dir)
    RunDirectory(run_dir / "demo").acquire()


def test_a_folder_that_was_there_before_stays_whatever_the_run_that_opens_it_is_refused_for(run_dir: Path):
    directory = RunDirectory.create(run_dir, "demo")
    directory.write_config(dump_config(config_of(run_dir)))
    directory.release()
    before = files_in(run_dir)
    refuse(config_of(run_dir), run_dir / "demo")
    assert {name: text for name, text in files_in(run_dir).items() if not name.endswith("/lock")} == {
        name: text for name, text in before.items() if not name.endswith("/lock")
    }


@pytest.mark.parametrize("more", ["notes.txt", "logs/notes.txt", "samples/notes.txt"])
def test_a_folder_that_holds_a_file_of_somebody_elses_stays_and_that_is_told(
    more: str, run_dir: Path, caplog: pytest.LogCaptureFixture
):
    refuse(config_of(run_dir), more=more)
    assert (run_dir / "demo" / more).read_text() == "mine"
    assert (run_dir / "demo" / "config.yaml").is_file()
    assert f"demo is of a run that has not begun, and stays: it holds {more}; remove it" in caplog.text


def test_a_run_that_goes_on_is_looked_at_by_the_config_that_it_stored(run_dir: Path, monkeypatch: Environment):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = "{name: g, kind: judge, judge: {base_url: 'http://judge/v1', api_key_env: JUDGE_KEY}}"
    _, directory = open_directory(config_of(run_dir, f"reward.graders=[{judge}]"), None)
    directory.release()
    with pytest.raises(ConfigError, match="takes its key from JUDGE_KEY"):
        opened(config_of(run_dir), str(directory.path))
    directory.acquire()  # and gives the lock back


@pytest.mark.parametrize(("is_new", "overrides"), [(False, ()), (True, ("ray.address=head:6379",))])
def test_an_agent_in_a_folder_of_the_configs_own_is_found(
    is_new: bool, overrides: tuple[str, ...], run_dir: Path, tmp_path: Path, monkeypatch: Environment
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"agent_of_{'a_new_run' if is_new else 'a_resume'}"
    (tmp_path / f"{module}.py").write_text("def play(base_url, prompt):\n    return None\n")
    served = ("rollout.servers.enabled=true", "roles.rollout.colocate=shared", f"rollout.servers.agent={module}:play")
    overrides = (*served, f"code.import_paths=[{tmp_path}]", *overrides)
    config = config_of(run_dir, *overrides)
    resumed = None if is_new else open_directory(config, None)[1].path
    check_before(config, resumed)
    nobody = f"rollout.servers.agent={module}:nobody"
    with pytest.raises(ConfigError, match=rf"rollout.servers.agent is '{module}:nobody'"):
        check_before(config_of(run_dir, *overrides, nobody), resumed)
