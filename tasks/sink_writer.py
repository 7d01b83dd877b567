"""One background thread for TensorBoard, Weights & Biases and MLflow: the training never waits for them or fails with
them. What they do not take is counted, and told once."""

import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from prefect.logging import get_logger

from resources.telemetry.sinks import Sink, open_sink

OPEN_SECONDS = 120.0
"""A sink that asks its server, and a package that is read from a slow disk."""
CLOSE_SECONDS = 30.0
BROKEN_OFF_SECONDS = 3.0
"""At the end of a run that was stopped: whoever stops it waits."""
MAX_WAITING = 10_000
"""Iterations that wait for a sink that hangs; later ones are not kept for it."""


class SinkWriter:
    """Opens the sinks, writes to them and closes them, all in one thread: MLflow's open run is the thread's own."""

    def __init__(self, names: Sequence[str], run_dir: Path, close_seconds: float = CLOSE_SECONDS) -> None:
        """Raises what a sink cannot be opened for (ImportError for a missing extra), TimeoutError naming the sinks."""
        self._names, self._run_dir, self._close_seconds = tuple(names), run_dir, close_seconds
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._is_open = threading.Event()
        self._refusal: Exception | None = None
        self.failed: Counter[str] = Counter()
        """Sink -> iterations that it did not take."""
        self._thread = threading.Thread(target=self._work, name="sink-writer", daemon=True)
        self._thread.start()
        if not self._is_open.wait(OPEN_SECONDS):
            raise TimeoutError(
                f"the sinks {list(self._names)} of telemetry.sinks did not open within {OPEN_SECONDS:g} s"
            )
        if self._refusal is not None:
            raise self._refusal

    def put(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write this soon; returns at once."""
        try:
            self._waiting.put_nowait((iteration, dict(metrics)))
        except queue.Full:
            for name in self._names:
                self._fail(name, f"{MAX_WAITING} iterations wait for it already")

    def close(self, seconds: float) -> None:
        """Write what waits and close the sinks; gives up after so long, and says what was not written."""
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass  # told below: the thread hangs
        left = sum(record is not None for record in list(self._waiting.queue))
        if self._thread.is_alive() or left:
            get_logger("callsheet").warning(
                "the sinks %s of telemetry.sinks did not end within %g s; about %d iterations are not in them",
                list(self._names), seconds, left,
            )  # fmt: skip
        for name, count in self.failed.items():
            get_logger("callsheet").warning("sink %s did not take %d iterations; metrics.jsonl has them", name, count)

    def __enter__(self) -> "SinkWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self._close_seconds if kind is None else min(self._close_seconds, BROKEN_OFF_SECONDS))

    def _work(self) -> None:
        sinks: dict[str, Sink] = {}
        try:
            for name in self._names:
                sinks[name] = open_sink(name, self._run_dir)
        except Exception as error:  # noqa: BLE001 - foreign code: raised again where the run opens them
            self._refusal = error
        except SystemExit as error:
            self._refusal = RuntimeError(f"a sink of telemetry.sinks ended the thread that opens it: {error!r}")
        finally:
            self._is_open.set()
        while self._refusal is None and (record := self._waiting.get()) is not None:
            for name, sink in sinks.items():
                try:
                    sink.write(*record)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: it costs its own line alone
                    self._fail(name, error)
        for name, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - foreign code
                get_logger("callsheet").warning("sink %s did not close: %s", name, error)

    def _fail(self, name: str, reason: object) -> None:
        if not self.failed[name]:
            get_logger("callsheet").warning("sink %s of telemetry.sinks is not up to date: %s", name, reason)
        self.failed[name] += 1
