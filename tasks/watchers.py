"""Who is told of a committed iteration: the Prefect UI, the console, Prometheus and other sinks.

None of them can hold the run back or end it: the UI's writes go through one background thread, the sinks' through
another.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from configs.run import RunConfig
from resources.telemetry.live import IterationView
from resources.telemetry.spans import TaskSpan
from tasks.artifacts import RunArtifacts, Sample
from tasks.retention import Retention
from tasks.sink_writer import SinkWriter
from tasks.ui_writer import UiWriter

if TYPE_CHECKING:
    from resources.telemetry.exporter import PrometheusExporter

MAIN_CURVES = ("reward/score_mean", "validation/sampled_accuracy", "validation/accuracy", "critic/explained_variance")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One committed iteration, as watchers see it."""

    iteration: int
    iterations: int
    metrics: Mapping[str, float]
    spans: Sequence[TaskSpan] = ()
    view: IterationView | None = None
    samples: Sequence[Sample] = ()
    subflow_id: UUID | None = None


Watcher = Callable[[Progress], None]
_WATCHING: list[Watcher] = []


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Runs that this process opens inside the block tell `watcher` too (the console, a test)."""
    _WATCHING.append(watcher)
    try:
        yield
    finally:
        _WATCHING.remove(watcher)


@contextlib.contextmanager
def open_watchers(config: RunConfig, run_id: str, run_dir: Path) -> Iterator[list[Watcher]]:
    """Everybody who is told of this run's iterations."""
    with prefect_watcher(config, run_id) as in_prefect, telemetry_sinks(config, run_dir) as sinks:
        yield [in_prefect, *sinks, *_WATCHING]


@contextlib.contextmanager
def prefect_watcher(config: RunConfig, run_id: str) -> Iterator[Watcher]:
    """Artifacts on the flow run (progress, metrics, curve, timings, verdict, samples), and pruning of old task rows."""
    with UiWriter() as writer:
        artifacts = RunArtifacts(writer, run_id, config.iterations, MAIN_CURVES)
        retention = Retention(writer, config.prefect.prune_after_iterations)

        def watch(progress: Progress) -> None:
            artifacts.iteration(progress.iteration, progress.metrics, progress.spans)
            if progress.view is not None:
                artifacts.verdict(f"{progress.view.markdown()}\n![timeline]({progress.view.image_uri()})\n")
            if progress.samples:
                artifacts.samples(progress.samples)
            if progress.subflow_id is not None:
                retention.ended(progress.subflow_id)

        yield watch


@contextlib.contextmanager
def telemetry_sinks(config: RunConfig, run_dir: Path) -> Iterator[list[Watcher]]:
    """Prometheus on a loopback port and the sinks of `telemetry.sinks`, where the config asks for them."""
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        if config.telemetry.sinks:
            watchers.append(partial(_write, stack.enter_context(SinkWriter(config.telemetry.sinks, run_dir))))
        if config.telemetry.prometheus_port is not None:
            from resources.telemetry.exporter import PrometheusExporter

            watchers.append(
                partial(_publish, stack.enter_context(PrometheusExporter(config.telemetry.prometheus_port)))
            )
        yield watchers


def _write(writer: SinkWriter, progress: Progress) -> None:
    writer.put(progress.iteration, progress.metrics)


def _publish(exporter: "PrometheusExporter", progress: Progress) -> None:
    if progress.view is not None:
        exporter.publish(progress.view.times, progress.view.verdict, dict(progress.metrics))
