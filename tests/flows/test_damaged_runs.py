"""Commands on run folders as power cuts, full disks and other versions leave them: a refusal in words, no traceback."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from configs.load import dump_config, load_config
from configs.yaml_reader import write_plain_yaml
from flows.cli import main
from resources.samples import COLUMNS
from tests.resources.telemetry.scenarios import iteration, run_record, write_run

BINARY = bytes(range(256)) * 4
WHOLE_MANIFEST = {
    "run_id": "demo", "iteration": 10, "policy_version": 10, "data_position": {}, "kl_coef": 0.0, "config_digest": "",
    "metrics_bytes": 0, "checksums": {}, "format": 2,
}  # fmt: skip

Damage = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two iterations with its config, one file of samples and a checkpoint without tensors."""
    folder = tmp_path / "demo"
    (folder / "samples").mkdir(parents=True)
    (folder / "checkpoints" / "iteration-000010").mkdir(parents=True)
    write_run(folder, [iteration(0), iteration(1, 10.0)], run_record())
    (folder / "config.yaml").write_text(write_plain_yaml(dump_config(load_config("quickstart"))))
    (folder / "checkpoints" / "iteration-000010" / "manifest.json").write_text(json.dumps(WHOLE_MANIFEST))
    table = {name: [1] for name in COLUMNS}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "samples" / "iteration-000001.parquet")
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "holds no section"),
        (BINARY, "not UTF-8 text"),
        (b"name: demo\nmodel:\n\tbuild: tiny\n", "line 3, column 1"),
        (b"seed: !!python/name:os.system\n", "the value has a tag"),
        (b"name: demo\niterations: 3\n", "pools is missing"),
        (b"- a\n", "holds no section"),
    ],
)
@pytest.mark.parametrize("command", ["resume", "evaluate", "export"])
def test_a_run_whose_config_cannot_be_read_is_refused_with_why(
    command: str, text: bytes, why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "config.yaml").write_bytes(text)
    more = [run.parent / "model"] if command == "export" else []
    assert why in refusal(capsys, command, run, *more)


MANIFESTS = [
    ("[]", "holds \\[\\], which is no manifest"),
    ("null", "holds None"),
    ("", "no readable manifest"),
    ('{"format": 2}', "not as this version writes it"),
    ('{"format": 3, "checksums": {}}', "format 3; this version reads 2"),
    (json.dumps({**WHOLE_MANIFEST, "added_later": 1}), "added_later"),
    (json.dumps({**WHOLE_MANIFEST, "checksums": [1]}), "not as this version writes it"),
    (json.dumps({**WHOLE_MANIFEST, "checksums": {"actor.bin": "0"}}), "actor.bin is missing"),
]


@pytest.mark.parametrize(("manifest", "why"), MANIFESTS)
@pytest.mark.parametrize("command", [("export",), ("export", "--iteration", "10"), ("evaluate",), ("resume",)])
def test_a_run_whose_only_checkpoint_is_damaged_is_refused_with_why(
    command: tuple[str, ...], manifest: str, why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "checkpoints" / "iteration-000010" / "manifest.json").write_text(manifest)
    more = [run.parent / "model"] if command[0] == "export" else []
    assert re.search(why, refusal(capsys, command[0], run, *more, *command[1:]))
    assert not (run.parent / "model").exists()


def test_a_resume_with_an_edited_config_is_refused_before_any_server_is_started(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    edited = load_config("quickstart", ["algorithm.loss=no_such_module:loss"])
    (run / "config.yaml").write_text(write_plain_yaml(dump_config(edited)))
    told = refusal(capsys, "resume", run)
    assert "Prefect UI" not in told
    assert "algorithm.loss is 'no_such_module:loss'" in told
    assert "algorithm.name is 'ppo'; so the critic is saved with the run, and the checkpoint of iteration 10" in told


def no_parquet(file: Path) -> None:
    file.write_bytes(BINARY)


def another_programs(file: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(no_parquet, "cannot be read"), (Path.touch, "cannot be read"), (another_programs, "no columns")],
)
def test_samples_that_cannot_be_read_are_refused_with_why(
    damage: Damage, why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    file = run / "samples" / "iteration-000001.parquet"
    file.unlink()
    damage(file)
    assert why in refusal(capsys, "rollouts", run)


def test_a_folder_with_the_name_of_samples_is_none(run: Path, capsys: pytest.CaptureFixture[str]):
    file = run / "samples" / "iteration-000001.parquet"
    file.unlink()
    file.mkdir()
    assert "holds no samples" in refusal(capsys, "rollouts", run)


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_fewer_than_one_row_is_refused(limit: str, run: Path, capsys: pytest.CaptureFixture[str]):
    assert f"--limit is {limit}; it is at least 1" in refusal(capsys, "rollouts", run, "--limit", limit)


def test_rows_of_a_source_that_none_is_of_are_refused_with_those_that_are(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    told = refusal(capsys, "rollouts", run, "--source", "nope")
    assert "--source is 'nope'; the rows of iteration 1 are of" in told


@pytest.mark.parametrize("option", ["--html", "--trace"])
@pytest.mark.parametrize("target", ["samples", "spans.jsonl/page"])
def test_a_report_that_cannot_be_written_is_refused_with_the_option(
    option: str, target: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    assert f"name another file with {option}" in refusal(capsys, "report", run, option, run / target)


def test_a_report_leaves_out_what_it_cannot_read(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "metrics.jsonl").write_text('3\n[1]\n{"iteration": null, "a": 1}\n{"iteration": 1, "a": 2.0}\n')
    assert main(["report", str(run)]) == 0
    assert "2 complete iterations" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["NaN", "Infinity", "null", '"late"', "true"])
def test_spans_with_a_time_that_is_none_are_left_out(word: str, run: Path, capsys: pytest.CaptureFixture[str]):
    lines = (run / "spans.jsonl").read_text().splitlines()
    (run / "spans.jsonl").write_text(
        "\n".join([lines[0], *(re.sub(r'"ended":[^,}]*', f'"ended":{word}', line) for line in lines[1:])]) + "\n"
    )
    assert "no iteration of this run is complete" in refusal(capsys, "whatif", run, "--set", "rollout.group_size=2")


@pytest.mark.parametrize(
    "damage",
    [
        '"queue_seconds":null',
        '"communication_seconds":null',
        '"weights_seconds":1.0,"weights_age_seconds":null',
        '"weights_age_seconds":1.0,"weights_seconds":null',
    ],
)
def test_reports_and_what_ifs_go_on_over_a_rank_whose_duration_is_null(
    damage: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    """A duration of its own costs the task's line; a fact costs itself."""
    lines = (run / "spans.jsonl").read_text().splitlines()
    damaged = [line.replace('"ranks":[{', f'"ranks":[{{{damage},') for line in lines if '"task":"reference"' in line]
    others = [line for line in lines[1:] if '"task":"reference"' not in line]
    (run / "spans.jsonl").write_text("\n".join([lines[0], *damaged, *others]) + "\n")
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert "2 complete iterations" in told
    assert ("2 lines could not be read" in told) == ("weights" not in damage)
    assert main(["whatif", str(run), "--set", "rollout.group_size=2"]) == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("rollout.group_size=1000000000000", "it is a whole number from 1 to 1000000"),
        ("rollout.max_running_sequences=0", "rollout.max_running_sequences is 0; it is a whole number from 1 to"),
        ("rollout.max_running_sequences=-1", "it is a whole number from 1 to"),
        ("cores=-2", "cores is -2; it is a whole number from 1 to 1000000; give one, for example cores=1"),
        ("cores=0", "cores is 0; it is a whole number from 1"),
        ("cores=nan", "cores is nan; it is a whole number from 1"),
        ("cores=", "cores is empty; it is a whole number from 1"),
        ("cores", "a change is written KEY=VALUE"),
        ("pools.main.bundles=0", "pools.main.bundles is 0; it is a whole number from 1 to 16384"),
        ("roles.rollout.tensor_parallel=inf", "roles.rollout.tensor_parallel is inf; it is a whole number from 1"),
        ("data.prompts_per_iteration=-1", "data.prompts_per_iteration is -1; it is a whole number from 1"),
        ("async_depth=1000000000", "async_depth is 1000000000; it is a whole number from 0 to 1000"),
    ],
)
def test_a_what_if_that_cannot_be_simulated_is_refused(
    change: str, why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    assert why in refusal(capsys, "whatif", run, "--set", change)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--search", "2", "--set", "rollout.group_size=2"), "give one of them"),
        (("--search", "2", "--max-async-depth", "-1"), "0 or more"),
        (("--max-async-depth", "1"), "it bounds a --search"),
        (("--search", "2", "--max-async-depth", "1001"), "it is 0 or more, 1000 at most"),
        (("--search", "0"), "accelerators is 0; a layout has 1 to 16384"),
        (("--search", "-3"), "accelerators is -3; a layout has 1 to 16384"),
        (("--search", "1000000000"), "accelerators is 1000000000; a layout has 1 to 16384"),
    ],
)
def test_an_option_that_a_what_if_would_ignore_is_refused(
    options: tuple[str, ...], why: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    assert why in refusal(capsys, "whatif", run, *options)


@pytest.mark.parametrize("options", [(), ("--search", "4")])
def test_a_what_if_as_json_has_no_python_in_it(options: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["whatif", str(run), "--json", *options]) == 0
    text = capsys.readouterr().out
    json.loads(text)
    assert "frozenset" not in text


@pytest.mark.parametrize(
    "command",
    [("report",), ("whatif",), ("rollouts",), ("resume",), ("export", "model"), ("evaluate",), ("plan", "--run")],
)
def test_a_name_too_long_for_a_folder_is_refused(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    name, arguments = "a" * 300, list(command)
    if command[0] == "plan":
        arguments = ["plan", "quickstart", "--run", name]
    else:
        arguments.insert(1, name)
    assert name in refusal(capsys, *arguments)


def test_a_model_with_a_name_too_long_for_a_folder_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    unbuilt = ["--set", "model.build=null", "--set", "model.shape=null", "--set", f"model.path={'a' * 300}"]
    assert "no local config.json" in refusal(capsys, "plan", "quickstart", *unbuilt)


def test_a_checkpoint_without_the_actors_tensors_is_not_exported(run: Path, capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, "export", run, run.parent / "model")
    assert "the checkpoint of 10 iterations cannot be exported" in said
    assert not (run.parent / "model").exists()


def test_a_run_whose_model_is_gone_is_not_exported(run: Path, capsys: pytest.CaptureFixture[str]):
    gone = ["model.build=null", "model.path=/no/such/model"]
    (run / "config.yaml").write_text(write_plain_yaml(dump_config(load_config("quickstart", gone))))
    assert "/no/such/model" in refusal(capsys, "export", run, run.parent / "model")


@pytest.mark.parametrize("name", ["model", "model/v1", "checkpoints/best", "samples/x", "logs/x", "events.jsonl"])
@pytest.mark.parametrize("form", ["{run}/{name}", "{run}/../demo/{name}", "{run}-by-link/{name}"])
def test_an_export_does_not_take_the_place_of_a_runs_own_files(
    form: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    Path(f"{run}-by-link").symlink_to(run)
    target, first = form.format(run=run, name=name), name.partition("/")[0]
    said = refusal(capsys, "export", run, target)
    assert f"{target} is where {run} keeps its own {first}; name a folder outside of the run" in said


def test_an_export_does_not_write_through_a_link(run: Path, capsys: pytest.CaptureFixture[str]):
    (run.parent / "model").symlink_to(run.parent / "elsewhere")
    assert "exists; name a folder that does not" in refusal(capsys, "export", run, run.parent / "model")
