"""A benchmark in a process of its own: when it counts as one that ended well."""

from pathlib import Path

import pytest

from benchmarks.all import COMMANDS, lines_of
from benchmarks.in_a_process import figures_in, problem_of, run
from resources.cpu_features import multiplies_bfloat16

GOOD, MISSED = '{"name": "x", "ok": true}\n', '{"name": "x", "ok": false}\n'


@pytest.mark.parametrize(
    ("status", "output", "problem"),
    [
        (0, GOOD, ""),
        (1, GOOD, "exit status 1: RayError: gone"),
        (1, GOOD + MISSED, ""),
        (-9, GOOD, "exit status -9: RayError: gone"),
        (0, "no figure\n", "exit status 0: RayError: gone"),
        (1, "", "exit status 1: RayError: gone"),
    ],
)
def test_an_error_status_is_a_failure_unless_a_line_says_that_a_target_is_missed(
    status: int, output: str, problem: str
):
    assert problem_of(status, output, "Traceback\nRayError: gone\n") == problem


def test_a_line_that_the_end_cut_off_is_no_figure():
    assert figures_in("started\n" + GOOD + '{"name": "y", "o') == [{"name": "x", "ok": True}]


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `benchmarks` with one benchmark, for processes started here."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return folder / "made.py"


def test_a_benchmark_that_crashes_behind_a_good_line_fails(benchmark: Path):
    figure = '{"name": "a", "value": 1, "unit": "s", "target": 2, "better": "lower", "ok": true}'
    benchmark.write_text(f"print('{figure}', flush=True)\nraise ValueError('half way')\n")
    good, failed = lines_of("made", ())
    assert (good["name"], good["ok"], good["benchmark"]) == ("a", True, "made")
    assert (failed["name"], failed["ok"]) == ("exit status 1: ValueError: half way", False)


def test_a_benchmark_that_takes_too_long_keeps_what_it_printed_and_fails(benchmark: Path):
    benchmark.write_text(f"import time\nprint('{GOOD.strip()}', flush=True)\ntime.sleep(60)\n")
    ended = run("made", (), 3.0)
    assert (ended.lines, ended.problem) == ([{"name": "x", "ok": True}], "took longer than 3 s")


def test_the_table_has_the_whole_iteration_of_the_real_model_and_the_start():
    models = {" ".join(arguments) for arguments in COMMANDS["iteration"] if "smollm2" in arguments}
    common = "--model smollm2 --keep-memory"
    in_bfloat16 = {f"{common} --dtype bfloat16"} if multiplies_bfloat16() else set()
    assert models == {common, f"{common} --tokens 128"} | in_bfloat16
    assert "startup" in COMMANDS
