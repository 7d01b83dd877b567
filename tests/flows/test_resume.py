"""Resume and retry: exact, from the right iteration, once; a finished run does nothing; other data starts anew."""

import signal
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL

from configs.load import dump_config
from configs.run import RunConfig
from configs.yaml_reader import write_plain_yaml
from flows.cli import REFUSED, main
from flows.ppo import ppo
from resources.checkpoints import CheckpointStore
from resources.run_directory import RunDirectory, RunDirectoryError, read_lines
from resources.run_summary import finished_summary
from tests.chaos.commands import resume, train, wait_for_iterations, wait_until_gone
from tests.chaos.faults import Fault, Injector
from tests.chaos.runs import assert_same_run, events_of, metrics_of, tiny_config

ITERATIONS = 5


@pytest.fixture(scope="module")
def undisturbed(prefect_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run without a fault."""
    runs = tmp_path_factory.mktemp("undisturbed")
    ppo(config_of(runs, "undisturbed"))
    return runs / "undisturbed"


def config_of(run_dir: Path, name: str, **sections: object) -> RunConfig:
    return tiny_config(
        run_dir,
        name,
        iterations=ITERATIONS,
        engine="scripted",
        **{"checkpoint": {"every": 1, "keep": -1}, "prefect": {"api_url": PREFECT_API_URL.value()}, **sections},
    )


@pytest.mark.slow
def test_checkpoints_are_those_of_every_iteration_each_once(undisturbed: Path):
    assert CheckpointStore(undisturbed / "checkpoints").iterations() == [1, 2, 3, 4, 5]
    assert [event["iteration"] for event in events_of(undisturbed, "checkpoint")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_finished_run_says_so_and_does_nothing(undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    before = (undisturbed / "events.jsonl").read_bytes()
    assert main(["resume", str(undisturbed)]) == 0
    assert "is finished: 5 of 5 iterations" in capsys.readouterr().err
    assert (undisturbed / "events.jsonl").read_bytes() == before
    assert finished_summary(undisturbed, ITERATIONS + 1) is None


@pytest.mark.slow
def test_a_killed_controller_resumes_to_the_same_bits_and_leaves_no_process(undisturbed: Path, run_dir: Path):
    command = train(config_of(run_dir, "killed"), run_dir)
    assert wait_for_iterations(command, run_dir / "killed", 2)
    command.send(signal.SIGKILL)
    command.wait()
    assert wait_until_gone("killed") == []
    again = resume(run_dir / "killed", run_dir)
    assert again.wait() == 0, again.output()[-3000:]
    assert_same_run(run_dir / "killed", undisturbed)
    assert wait_until_gone("killed") == []


@pytest.mark.slow
def test_a_retried_flow_run_goes_on_and_repeats_no_finished_step(undisturbed: Path, run_dir: Path):
    config = config_of(run_dir, "retried", recovery={"max_recoveries": 0})
    fault = Fault(iteration=2, target="reward", step="reward")
    with Injector(faults=[fault]) as injector:
        ppo.with_options(retries=1)(config)
    assert not injector.left
    assert [event["iteration"] for event in events_of(run_dir / "retried", "resumed")] == [2]
    assert events_of(run_dir / "retried", "config-changed") == []
    assert_same_run(run_dir / "retried", undisturbed)


@pytest.mark.slow
def test_a_retried_flow_run_does_not_take_over_the_folder_of_another_run(undisturbed: Path):
    config = config_of(undisturbed.parent, "undisturbed", seed=8)
    before = {path: path.read_bytes() for path in undisturbed.rglob("*.jsonl")}
    with pytest.raises(RunDirectoryError, match="undisturbed exists; resume it"):
        ppo.with_options(retries=1)(config)
    assert {path: path.read_bytes() for path in undisturbed.rglob("*.jsonl")} == before


@pytest.mark.slow
def test_a_plan_that_does_not_fit_leaves_its_name_to_one_that_does(
    prefect_session: None, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    settings = {"iterations": 1, "checkpoint": {"every": 1}, "prefect": {"api_url": PREFECT_API_URL.value()}}
    config, file = tiny_config(run_dir, "tight", engine="scripted", **settings), run_dir.parent / "tight.yaml"
    file.write_text(write_plain_yaml(dump_config(config)))
    assert main(["train", str(file), "--set", "pools.main.cpus_per_bundle=9"]) == REFUSED
    assert not (run_dir / "tight").exists()
    assert main(["train", str(file)]) == 0
    assert "resume" not in capsys.readouterr().err


@pytest.mark.slow
def test_other_data_starts_at_its_beginning_and_says_so(undisturbed: Path, run_dir: Path):
    config = config_of(run_dir, "other-data")
    ppo(config)
    path = run_dir / "other-data" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["iterations"] = ITERATIONS + 1
    stored["data"]["sources"][0] |= {"seed": 2, "size": 20}  # fewer rows than were used so far
    path.write_text(yaml.safe_dump(stored))
    ppo(config, str(run_dir / "other-data"))
    changed = events_of(run_dir / "other-data", "data-changed")
    assert [(event["epoch"], event["start"]) for event in changed] == [(0, 0)]
    assert [event["iteration"] for event in events_of(run_dir / "other-data", "config-changed")] == [ITERATIONS]
    assert [line["iteration"] for line in metrics_of(run_dir / "other-data")] == list(range(ITERATIONS + 1))


def test_a_torn_metrics_line_and_lines_after_the_checkpoint_are_cut(run_dir: Path):
    directory = RunDirectory.create(run_dir, "torn")
    directory.append(directory.metrics, {"iteration": 0})
    kept = directory.metrics.stat().st_size
    directory.append(directory.metrics, {"iteration": 1})
    with directory.metrics.open("a") as file:
        file.write('{"iteration": 2, "actor/lo')
    directory.cut(directory.metrics, kept)
    assert list(read_lines(directory.metrics)) == [{"iteration": 0}]
