"""Lines of a run's files: a disk that fills up in the middle of one leaves none of it."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from resources.run_directory import RunDirectory
from resources.telemetry.recorder import SpanFile
from resources.telemetry.spans import IterationSpan
from tests.alone import alone

Append = Callable[[Path, int], None]


def as_event(path: Path, iteration: int) -> None:
    RunDirectory(path.parent).append(path, {"iteration": iteration})


def as_span(path: Path, iteration: int) -> None:
    SpanFile(path).append(IterationSpan(iteration=iteration, started=0.0, ended=1.0))


def append_on_a_disk_full_at(size: int, append: Append, path: Path, iteration: int) -> None:
    """No file grows beyond `size`: a write that would takes what fits, and the next one fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        append(path, iteration)


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("append", [as_event, as_span])
def test_a_line_for_which_the_disk_has_no_room_leaves_nothing_of_itself(tmp_path: Path, append: Append):
    path = tmp_path / "lines.jsonl"
    append(path, 0)
    alone(append_on_a_disk_full_at, path.stat().st_size + 10, append, path, 1)
    assert iterations(path) == [0]
    append(path, 2)
    assert iterations(path) == [0, 2]


@pytest.mark.parametrize("append", [as_event, as_span])
def test_a_line_after_one_that_was_cut_off_begins_on_its_own(tmp_path: Path, append: Append):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"iteration": 0')
    append(path, 1)
    append(path, 2)
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"iteration": 0'
    assert [json.loads(line)["iteration"] for line in whole] == [1, 2]
