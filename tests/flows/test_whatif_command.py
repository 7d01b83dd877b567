"""`callsheet whatif`: a prediction, what it is compared with, and what the run's own config would say of the layout."""

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import dump_config, load_config
from configs.yaml_reader import write_plain_yaml
from flows.cli import app, main
from resources.telemetry.spans import PoolRecord
from tests.resources.telemetry.scenarios import ROLES, iteration, run_record, write_run

REFUSES = "note: the run's config would refuse this: "
FUSED = dict.fromkeys(("actor", "rollout", "critic", "reference"), "fused")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A measured run whose layout is the quick start's."""
    record = run_record(
        pools={"main": PoolRecord(ranks=1)}, roles=dict.fromkeys(ROLES.values(), "main"), colocate=FUSED,
        prompts_per_iteration=512, group_size=1,
    )  # fmt: skip
    made = [iteration(number, 10.0 * number) for number in range(3)]
    for tasks, _ in made:
        for index, task in enumerate(tasks):
            tasks[index] = replace(task, pool="main")
    write_run(tmp_path, made, record)
    (tmp_path / "config.yaml").write_text(write_plain_yaml(dump_config(load_config("quickstart"))))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], run: Path, *changes: str) -> str:
    assert main(["whatif", str(run), *(word for change in changes for word in ("--set", change))]) == 0
    return capsys.readouterr().out


def test_an_unchanged_layout_changes_nothing_and_is_not_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    said = told(capsys, run)
    assert "(+0 % against " in said
    assert "note:" not in said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (("data.prompts_per_iteration=3",), "3 x 1 = 3 rows do not divide by it"),
        (("data.prompts_per_iteration=1000000",), "data.sources have 20000 rows"),
        (("pools.e=1", "roles.rollout.pool=e", "async_depth=1"), "also set roles.rollout.colocate=shared"),
    ],
)
def test_a_layout_that_the_config_refuses_is_predicted_with_a_note(
    changes: tuple[str, ...], why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    said = told(capsys, run, *changes)
    assert said.startswith("main[1]")
    assert why in next(line for line in said.splitlines() if line.startswith(REFUSES))


def test_the_json_holds_both_seconds_and_what_the_config_refuses(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["whatif", str(run), "--json", "--set", "data.prompts_per_iteration=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_seconds"] == pytest.approx(5.71)
    assert found["step_seconds"] < found["unchanged_seconds"]
    assert found["config_problems"][0].startswith("algorithm.num_mini_batches is 4")
    assert found["config_unchecked"] is None


@pytest.mark.parametrize(
    ("text", "why"),
    [("name: old\ncode: {ship: image}\n", "(and "), ("", "holds no section"), (None, "there is no such file")],
)
def test_a_config_that_no_longer_loads_is_a_note_of_its_own(
    text: str | None, why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "config.yaml").unlink()
    if text is not None:
        (run / "config.yaml").write_text(text)
    notes = [line for line in told(capsys, run, "cores=4").splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith("note: this was not checked against the run's config: ")
    assert why in notes[0]
    assert main(["whatif", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config_problems"] == []
    assert why in found["config_unchecked"]


def test_the_size_of_a_pool_without_roles_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["whatif", str(run), "--set", "pools.nope.bundles=4"]) == 2
    assert "no role stands in pool 'nope'" in capsys.readouterr().err


def test_a_folder_without_spans_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["whatif", str(tmp_path)]) == 2
    assert "is no run folder: it has neither config.yaml nor spans.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2.5", "2.0", "1e3", "many", ""])
@pytest.mark.parametrize(
    ("command", "option"),
    [("whatif", "--search"), ("rollouts", "--limit"), ("data", "--samples"), ("evaluate", "--prompts")],
)
def test_a_count_that_is_no_whole_number_is_refused(
    command: str, option: str, text: str, capsys: pytest.CaptureFixture[str]
):
    assert main([command, "quickstart", f"{option}={text}"]) == 2
    assert f"{option} is '{text}'; it is a whole number" in capsys.readouterr().err


def test_no_option_of_a_command_is_a_plain_int_which_would_be_rounded():
    main(["--version"])  # registers the commands
    read = {
        f"{name} {argument.name}": argument.parameter.converter
        for name, command in app.resolved_commands().items()
        if not name.startswith("-")  # --help and --version are cyclopts' own
        for argument in command.assemble_argument_collection()
        if int in (argument.hint, *typing.get_args(argument.hint))
    }
    assert len(read) >= 8
    assert not [where for where, converter in read.items() if converter is None]
