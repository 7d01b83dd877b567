"""What a person sees while a run goes on: one live panel on a terminal, a plain line an iteration elsewhere."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.watchers import Progress, Watcher

BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
SHOWN = (
    ("reward/score_mean", "score"),
    ("validation/sampled_accuracy", "sampled accuracy"),
    ("validation/accuracy", "greedy accuracy"),
    ("critic/explained_variance", "explained variance"),
    ("actor/reference_kl", "KL to reference"),
    ("actor/clip_fraction", "clip fraction"),
)


@contextlib.contextmanager
def console_watcher(title: str) -> Iterator[Watcher]:
    """A panel on a terminal; lines on standard error otherwise, so that standard output stays for results."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda progress: print(line_of(progress), file=sys.stderr, flush=True)
        return
    panel = RunPanel(title)
    with Live(panel.render(), console=console, refresh_per_second=4) as live:

        def watch(progress: Progress) -> None:
            panel.add(progress)
            live.update(panel.render())

        yield watch


def line_of(progress: Progress) -> str:
    """One iteration on one line: what was learnt, how long it took, and what held it back."""
    shown = [f"{label} {progress.metrics[name]:.3f}" for name, label in SHOWN if name in progress.metrics]
    seconds = progress.metrics.get("time/iteration", 0.0)
    verdict = f" | {progress.view.verdict.line}" if progress.view is not None else ""
    return f"[{progress.iteration + 1}/{progress.iterations}] {', '.join(shown)} | {seconds:.2f} s{verdict}"


def sparkline(values: list[float], width: int = CURVE_WIDTH) -> str:
    """The last `width` values as blocks between their own minimum and maximum.

    >>> sparkline([0.0, 0.5, 1.0])
    ' ▄█'
    """
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in shown)


class RunPanel:
    """Iteration, reward curve, a bar per role, time left."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._scores: list[float] = []
        self._seconds: list[float] = []
        """Of the iterations of this process: a resumed run has others behind it, which cost it nothing."""
        self._last: Progress | None = None

    def add(self, progress: Progress) -> None:
        """Take over an iteration."""
        self._last = progress
        self._seconds.append(progress.metrics.get("time/iteration", 0.0))
        if "reward/score_mean" in progress.metrics:
            self._scores.append(progress.metrics["reward/score_mean"])

    def render(self) -> Panel:
        """The panel as it stands."""
        last = self._last
        if last is None:
            return Panel(Text("starting"), title=self._title)
        done = last.iteration + 1
        left = sum(self._seconds) / len(self._seconds) * (last.iterations - done)
        head = Text(f"iteration {done} of {last.iterations}, about {left:.0f} s left")
        parts: list[Text | Table | ProgressBar] = [head, ProgressBar(total=last.iterations, completed=done)]
        if self._scores:
            parts.append(Text(f"score {self._scores[-1]:.3f}  {sparkline(self._scores)}"))
        parts.append(
            Text("  ".join(f"{label} {last.metrics[name]:.3f}" for name, label in SHOWN if name in last.metrics))
        )
        if last.view is not None:
            parts += [_role_bars(last), Text(last.view.verdict.line)]
        return Panel(Group(*parts), title=self._title)


def _role_bars(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 1))
    if progress.view is None:
        return table
    step = max(progress.view.times.step_seconds, 1e-9)
    for role in progress.view.times.roles:
        table.add_row(role.role, ProgressBar(total=step, completed=role.busy, width=40), f"{role.busy:.2f} s busy")
    return table
