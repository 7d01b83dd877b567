"""`callsheet report` on what a user may have: a run of an older version, one that never began, no run at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main
from tests.resources.telemetry.scenarios import iteration, run_record, write_run

ROOT = Path(__file__).parents[2]


def test_a_run_whose_config_has_keys_that_are_gone_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path, [iteration(0), iteration(1, 10.0)], run_record())
    (tmp_path / "config.yaml").write_text("name: old\ncode: {ship: image}\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "2 complete iterations" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("files", "why"), [((), "it has no config.yaml"), (("config.yaml",), "has no spans.jsonl: the run has not begun")]
)
def test_a_folder_without_spans_is_refused_with_what_it_lacks(
    files: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in files:
        (tmp_path / name).touch()
    assert main(["report", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["plan", "quickstart"], ["plan", "quickstart", "--json"], ["report", "RUN"], ["report", "RUN", "--json"]],
)
def test_output_onto_a_full_disk_is_told_in_a_line_and_fails(command: list[str], tmp_path: Path):
    write_run(tmp_path, [iteration(0), iteration(1, 10.0)], run_record())
    (tmp_path / "config.yaml").write_text("name: told\n")
    arguments = [str(tmp_path) if word == "RUN" else word for word in command]
    code = "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: No space left on device; make room\n")
