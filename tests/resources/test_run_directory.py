"""The run folder: never overwritten, never run twice at once, and cut back to what was committed."""

import resource
from pathlib import Path

import pytest

from configs.load import dump_config, load_config
from resources.run_directory import SIDE_RUN, RunDirectory, RunDirectoryError, check_free, is_run_folder, read_lines
from tests.alone import alone


def test_an_existing_run_is_refused_with_the_way_out(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    run.write_config({})
    with pytest.raises(RunDirectoryError, match=r"demo exists; resume it \(callsheet resume .*demo\), or give the new"):
        RunDirectory.create(run_dir, "demo")


def test_what_cannot_be_resumed_is_not_said_to_be(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    with pytest.raises(RunDirectoryError, match=r"holds no config.yaml.*: remove it, or give the new run another name"):
        check_free(run_dir, "demo")
    run.write_config({})
    run.event(SIDE_RUN)
    with pytest.raises(RunDirectoryError, match=r"of `callsheet sft` .* cannot be resumed: remove it, or give the new"):
        check_free(run_dir, "demo")


def test_a_run_in_use_cannot_be_acquired_again(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    with pytest.raises(RunDirectoryError, match="in use by process"):
        RunDirectory(run.path).acquire()
    run.release()
    RunDirectory(run.path).acquire()


def test_a_folder_without_a_config_is_no_run(tmp_path: Path):
    with pytest.raises(RunDirectoryError, match=r"no config\.yaml"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("name", ["1e5", "08", "null", "3."])
def test_a_config_is_read_back_as_it_was_written(run_dir: Path, name: str):
    run = RunDirectory.create(run_dir, name)
    config = load_config("quickstart", [f"name='{name}'"])
    run.write_config(dump_config(config))
    assert load_config(run.path / "config.yaml") == config
    run.release()


def _write_a_config_on_a_full_disk(run_dir: Path) -> None:
    run = RunDirectory.create(run_dir, "demo")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        run.write_config(dump_config(load_config("quickstart")))


def test_a_config_whose_write_is_cut_off_is_not_there(run_dir: Path):
    alone(_write_a_config_on_a_full_disk, run_dir)
    assert not is_run_folder(run_dir / "demo")


def test_cutting_to_a_committed_length_leaves_whole_lines(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    run.append(run.metrics, {"iteration": 0})
    committed = run.metrics.stat().st_size
    run.append(run.metrics, {"iteration": 1})
    run.cut(run.metrics, committed)
    assert [line["iteration"] for line in read_lines(run.metrics)] == [0]


def test_a_torn_last_line_is_left_out(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    run.append(run.spans, {"iteration": 0, "task": "rollout"})
    with run.spans.open("a") as file:
        file.write('{"iteration": 1, "ta')
    assert [line["iteration"] for line in read_lines(run.spans)] == [0]
    run.cut_after(run.spans, 1)
    assert run.spans.read_text().count("\n") == 1


def test_lines_of_an_open_iteration_are_cut(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    for iteration in (0, 1, 2):
        run.append(run.spans, {"iteration": iteration})
    run.cut_after(run.spans, 2)
    assert [line["iteration"] for line in read_lines(run.spans)] == [0, 1]


def test_a_line_whose_iteration_is_no_number_is_cut_and_one_without_is_kept(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    lines = ['{"record": "run"}', '{"iteration": 0}', '{"iteration": 7}']
    lines += [f'{{"iteration": {word}}}' for word in ("null", '"0"', "[0]", "0.5", "true", "9" * 5000)]
    run.spans.write_text("\n".join([*lines, "[" * 100_000, '{"iteration": 1}', ""]))
    run.cut_after(run.spans, 2)
    assert list(read_lines(run.spans)) == [{"record": "run"}, {"iteration": 0}, {"iteration": 1}]


def test_a_folder_that_cannot_be_made_is_refused_with_the_way_out(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"demo cannot be made: Not a directory; choose another folder"):
        RunDirectory.create(tmp_path / "file" / "runs", "demo")


@pytest.mark.parametrize("text", ["3\n", "[1]\n", "null\n", '{"iteration": 1', "\udcff\n"])
def test_a_line_that_is_no_object_hides_none_before_or_after_it(tmp_path: Path, text: str):
    (tmp_path / "lines").write_bytes(('{"iteration": 0}\n' + text).encode(errors="surrogateescape"))
    assert list(read_lines(tmp_path / "lines")) == [{"iteration": 0}]
    RunDirectory(tmp_path).append(tmp_path / "lines", {"iteration": 1})
    assert list(read_lines(tmp_path / "lines")) == [{"iteration": 0}, {"iteration": 1}]


def test_what_was_done_alone_is_known_behind_an_event_that_was_cut_off(run_dir: Path):
    run = RunDirectory.create(run_dir, "demo")
    run.events.write_text('{"kind": "resum')
    run.event(SIDE_RUN)
    assert run.is_side_run
