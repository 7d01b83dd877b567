"""What the Prefect UI shows of a run besides its tasks: progress, metrics, curve, role timings, samples, verdict.

Each is one artifact that is updated in place: a new version per iteration would grow the database with its square.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext

from resources.telemetry.spans import TaskSpan
from tasks.curve import Series, curve_svg
from tasks.ui_writer import UiWriter

TABLE_ROWS = 50
"""Newest iterations in a table; all of them are in metrics.jsonl."""
CURVE_POINTS = 300
SAMPLE_CHARACTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response as a person reads it."""

    prompt: str
    response: str
    score: float | None
    iteration: int


class RunArtifacts:
    """The artifacts of the flow run it is made in; writes go through `writer` and cost the flow nothing."""

    def __init__(
        self, writer: UiWriter, run_id: str, num_iterations: int, curves: Sequence[str] = ("reward/score_mean",)
    ) -> None:
        """`curves`: metrics drawn over the iterations; the first is the main one."""
        self._writer = writer
        self._slug = artifact_key(run_id)
        self._num_iterations = num_iterations
        self._flow_run_id = _current_flow_run()
        self._ids: dict[str, UUID] = {}
        self._metrics: list[dict[str, Any]] = []
        self._timings: list[dict[str, Any]] = []
        self._series = {name: Series(name=name) for name in curves}

    def iteration(self, number: int, metrics: Mapping[str, float], spans: Iterable[TaskSpan] = ()) -> None:
        """An iteration ended: show progress, its metrics, and the seconds of each step."""
        self._metrics.append(
            {"iteration": number, **{name: round(value, 6) for name, value in sorted(metrics.items())}}
        )
        timings = {
            span.task: round(span.ended - span.started, 4) for span in sorted(spans, key=lambda span: span.started)
        }
        if timings:
            self._timings.append({"iteration": number, **timings})
        for name, series in self._series.items():
            if name in metrics:
                series.add(number, float(metrics[name]), CURVE_POINTS)
        del self._metrics[:-TABLE_ROWS], self._timings[:-TABLE_ROWS]
        percent = 100.0 * (number + 1) / max(1, self._num_iterations)
        self._put("progress", "progress", min(100.0, percent), f"Iteration {number + 1} of {self._num_iterations}")
        self._put("metrics", "table", list(reversed(self._metrics)), f"Metrics of the last {TABLE_ROWS} iterations")
        if self._timings:
            self._put("role-timings", "table", list(reversed(self._timings)), "Seconds of each step, newest first")
        self._put("learning-curve", "markdown", self._curve_markdown(), "Learning curve")

    def samples(self, samples: Sequence[Sample]) -> None:
        """Show these responses instead of earlier ones."""
        self._put("samples", "markdown", samples_markdown(samples), "Sample responses")

    def verdict(self, markdown: str) -> None:
        """Show what the run says about itself: the bottleneck, its evidence, and what to change."""
        self._put("verdict", "markdown", markdown, "What limits this run")

    def _curve_markdown(self) -> str:
        series = [one for one in self._series.values() if one.values]
        if not series:
            return "No curve yet."
        image = base64.b64encode(curve_svg(series).encode()).decode()
        latest = "\n".join(f"- `{one.name}`: {one.values[-1]:.4g} (first {one.values[0]:.4g})" for one in series)
        return f"![learning curve](data:image/svg+xml;base64,{image})\n\n{latest}\n"

    def _put(self, name: str, kind: str, data: Any, description: str) -> None:
        text = json.dumps(data) if kind == "table" else data
        self._writer.put(name, partial(self._write, name, kind, text, description))

    def _write(self, name: str, kind: str, data: Any, description: str, client: SyncPrefectClient) -> None:
        if name in self._ids:
            client.update_artifact(self._ids[name], ArtifactUpdate(data=data, description=description))
            return
        made = client.create_artifact(
            ArtifactCreate(
                key=f"{self._slug}-{name}", type=kind, data=data, description=description, flow_run_id=self._flow_run_id
            )
        )
        self._ids[name] = made.id


def artifact_key(run_id: str) -> str:
    """Lower-case letters, digits and dashes, which is all that Prefect takes.

    >>> artifact_key("gsm8k-qwen2.5-0.5b_Run")
    'gsm8k-qwen2-5-0-5b-run'
    """
    return re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")


def samples_markdown(samples: Sequence[Sample]) -> str:
    """Samples as text that no response can break out of.

    >>> print(samples_markdown([Sample(prompt="2+2=", response="4", score=1.0, iteration=3)]))
    **Iteration 3, score 1**
    <BLANKLINE>
        2+2=
        4
    """
    blocks = []
    for sample in samples:
        score = "unscorable" if sample.score is None else f"score {sample.score:.4g}"
        text = f"{sample.prompt}\n{sample.response}"[:SAMPLE_CHARACTERS]
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        blocks.append(f"**Iteration {sample.iteration}, {score}**\n\n{indented}")
    return "\n\n".join(blocks)


def _current_flow_run() -> UUID | None:
    context = FlowRunContext.get()
    return context.flow_run.id if context is not None and context.flow_run is not None else None
