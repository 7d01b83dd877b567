"""Sinks are foreign code: what they raise, and how long they take, is theirs alone."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from resources.telemetry.sinks import SINKS
from tasks.sink_writer import SinkWriter


class Moody:
    """Refuses every second iteration."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "taken"

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration % 2:
            raise ConnectionError("429: slow down")
        with self._path.open("a") as file:
            file.write(f"{iteration} {metrics['loss']} {threading.current_thread().name}\n")

    def close(self) -> None:
        raise ConnectionError("no goodbye")


class Hanging:
    """Its server does not answer before `is_over`."""

    is_over = threading.Event()

    def __init__(self, run_dir: Path) -> None:
        """Opens at once."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.is_over.wait(120)

    def close(self) -> None:
        """Nothing to close."""


def test_what_a_sink_raises_costs_its_line_alone_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(SINKS, "moody", Moody)
    with SinkWriter(["moody"], tmp_path) as writer:
        for iteration in range(5):
            writer.put(iteration, {"loss": 0.5})
    assert (tmp_path / "taken").read_text().split("\n") == [f"{n} 0.5 sink-writer" for n in (0, 2, 4)] + [""]
    assert writer.failed == {"moody": 2}
    assert [record.message for record in caplog.records] == [
        "sink moody of telemetry.sinks is not up to date: 429: slow down",
        "sink moody did not close: no goodbye",
        "sink moody did not take 2 iterations; metrics.jsonl has them",
    ]


class Leaving(Moody):
    """Ends the thread that writes to it."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        raise SystemExit(3)


def test_a_sink_that_would_end_the_thread_costs_its_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SINKS, "moody", Moody)
    monkeypatch.setitem(SINKS, "leaving", Leaving)
    with SinkWriter(["leaving", "moody"], tmp_path) as writer:
        for iteration in (0, 2):
            writer.put(iteration, {"loss": 0.5})
    assert writer.failed == {"leaving": 2}
    assert (tmp_path / "taken").read_text().count("sink-writer") == 2


def test_a_sink_that_hangs_holds_nobody_up_and_is_given_up_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(SINKS, "hanging", Hanging)
    with SinkWriter(["hanging"], tmp_path, close_seconds=0.2) as writer:
        for iteration in range(3):
            writer.put(iteration, {"loss": 0.5})
    assert "the sinks ['hanging'] of telemetry.sinks did not end within 0.2 s" in caplog.text
    Hanging.is_over.set()


def test_a_sink_that_cannot_be_opened_is_refused_before_the_first_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(run_dir: Path) -> None:
        raise PermissionError("no key")

    monkeypatch.setitem(SINKS, "closed", refuse)
    with pytest.raises(PermissionError, match="no key"):
        SinkWriter(["closed"], tmp_path)


def test_tensorboard_has_every_iteration_when_the_run_is_over(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with SinkWriter(["tensorboard"], tmp_path) as writer:
        for iteration in range(3):
            writer.put(iteration, {"reward/score_mean": 0.25 * iteration})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward/score_mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
