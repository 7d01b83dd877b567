"""A run whose reader goes away."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from configs.load import dump_config
from flows.lasting_output import lasting_stderr
from tests.tasks.local_cast import small_config

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from flows.cli import main; sys.exit(main())"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The reading end, and a stream into the writing end."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        yield reader, stream


def test_what_is_written_arrives_while_somebody_reads(pipe: tuple[int, TextIO]):
    with redirect_stderr(pipe[1]), lasting_stderr():
        print("one", file=sys.stderr, flush=True)
    os.set_blocking(pipe[0], False)
    assert os.read(pipe[0], 100) == b"one\n"
    os.close(pipe[0])


def test_lines_are_lost_and_nothing_is_raised_once_the_reader_is_gone(pipe: tuple[int, TextIO]):
    os.close(pipe[0])
    with redirect_stderr(pipe[1]):
        with pytest.raises(BrokenPipeError):
            print("told", file=sys.stderr, flush=True)
        with lasting_stderr():
            for number in range(3):
                print(number, file=sys.stderr, flush=True)
        print("and afterwards, where the pipe was", file=sys.stderr, flush=True)


def test_a_full_disk_loses_lines_and_raises_nothing():
    with open("/dev/full", "w", buffering=1) as full, redirect_stderr(full):
        with pytest.raises(OSError, match="No space left"):
            print("told", file=sys.stderr, flush=True)
        with lasting_stderr():
            print("lost", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # room again: what is held back can be written


def test_a_stream_that_is_closed_is_still_an_error(pipe: tuple[int, TextIO]):
    os.close(pipe[0])
    pipe[1].close()
    with redirect_stderr(pipe[1]), lasting_stderr(), pytest.raises(ValueError, match="closed file"):
        print("x", file=sys.stderr)


@pytest.mark.slow
def test_a_run_goes_on_to_its_end_when_whoever_read_its_lines_has_left(tmp_path: Path):
    config = small_config(f"run_dir={tmp_path}", "name=unread", "iterations=4", "validation.every=0", "sft=null")
    file = tmp_path / "unread.yaml"
    file.write_text(yaml.safe_dump(dump_config(config)))
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "train", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline()  # the address of the Prefect UI
    process.stdout.close()
    process.wait(timeout=180)
    lines = (tmp_path / "unread" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2, 3]
    assert process.returncode == 0
