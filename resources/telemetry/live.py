"""What a running flow shows of an iteration it has just finished: metrics, a line, a table, a picture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from resources.telemetry.attribution import IterationTimes, attribute, waits_text
from resources.telemetry.causes import DEFAULT_THRESHOLDS, Thresholds
from resources.telemetry.spans import IterationSpan, TaskSpan
from resources.telemetry.timeline import Timeline
from resources.telemetry.timeline_image import timeline_data_uri
from resources.telemetry.verdict import Verdict, judge


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationView:
    """One finished iteration, attributed and judged."""

    timeline: Timeline
    times: IterationTimes
    verdict: Verdict

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl, all under `time/`: step, each task's execution, each role's parts, the verdict's cost."""
        metrics = {"time/step": self.times.step_seconds, "time/bottleneck_fraction": self.verdict.gain_fraction}
        for task in self.times.tasks:
            metrics[f"time/{task.task}"] = task.seconds
        for role in self.times.roles:
            parts = (
                ("busy", role.busy),
                ("transfer", role.transfer),
                ("waiting", sum(role.waiting.values())),
                ("idle", role.idle),
            )
            for part, seconds in parts:
                metrics[f"time/{role.role}/{part}"] = seconds
        return metrics

    def markdown(self) -> str:
        """Verdict and role table, for an artifact."""
        lines = [f"**{self.verdict.line}**", "", f"Change: {self.verdict.change}", ""]
        lines += ["| role | busy s | transfer s | waiting s | idle s | waits for |", "|---|--:|--:|--:|--:|---|"]
        for role in self.times.roles:
            whom = waits_text(role.waiting)
            numbers = (role.busy, role.transfer, sum(role.waiting.values()), role.idle)
            lines.append(f"| {role.role} | {' | '.join(f'{number:.2f}' for number in numbers)} | {whom} |")
        return "\n".join(lines) + "\n"

    def image_uri(self) -> str:
        """The time line as a `data:` URI."""
        title = f"iteration {self.times.iteration}: {self.verdict.role}, {self.verdict.cause}"
        return timeline_data_uri(self.timeline, title, list(self.times.path))


def view_iteration(
    tasks: Sequence[TaskSpan],
    span: IterationSpan,
    *,
    others: Sequence[TaskSpan] = (),
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    refused: tuple[str, ...] = (),
) -> IterationView:
    """Attributes and judges one iteration; `others` are tasks of its neighbours that overlap it (async depth > 0).

    `refused`: changes that the config would not take (`configs/changes.py`).
    """
    timeline, times = attribute(tasks, start=span.started, end=span.ended, others=others)
    return IterationView(timeline=timeline, times=times, verdict=replace(judge(timeline, thresholds), refused=refused))
