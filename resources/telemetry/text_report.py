"""The report as text: verdict, roles, what else would help, graders, what is missing."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from resources.telemetry.advice import bytes_text
from resources.telemetry.attribution import waits_text
from resources.telemetry.report import Report, role_table
from resources.telemetry.search import SearchResult
from resources.telemetry.whatif import Prediction

_FACT_NAMES = (
    "tokens_per_second",
    "flop_utilisation",
    "micro_batch_fill",
    "peak_memory_bytes",
    "kv_cache_use_max",
    "preemptions",
    "nonfinite_steps",
)


def render_text(report: Report, width: int = 110) -> str:
    """The report for a terminal of `width` columns, without colour codes."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False, record=False)
    with console.capture() as capture:
        _print(console, report)
    return capture.get()


def _print(console: Console, report: Report) -> None:
    complete = report.complete
    steps = sorted(summary.times.step_seconds for summary in complete)
    console.print(f"Run {report.run_dir.name}: {len(complete)} complete iterations", markup=False)
    if steps:
        console.print(f"step: median of all {steps[len(steps) // 2]:.3f} s, {steps[0]:.3f} to {steps[-1]:.3f} s")
    if report.verdict is not None:
        console.print(f"\nVerdict  {report.verdict.line}", markup=False)
        if report.verdict.num_steps < len(complete):
            console.print(f"         its means leave out the first of {len(complete)} iterations, which warms up")
        console.print(f"Change   {report.verdict.change}", markup=False)
    else:
        console.print("\nVerdict  none: no iteration is complete; what is missing stands below")
    if complete:
        console.print(_role_table(report))
    if report.verdict is not None and report.verdict.others:
        table = Table("role", "cause", "step without it", title="What else would shorten the step")
        for other in report.verdict.others:
            table.add_row(
                other.role,
                str(other.cause),
                f"-{100 * other.gain_seconds / max(1e-12, report.verdict.step_seconds):.0f} %",
            )
        console.print(table)
    if report.graders:
        table = Table("grader", "kind", "calls", "slow", "p50 s", "p95 s", "max s", "time-outs", title="Graders")
        for grader in report.graders:
            numbers = [f"{grader.get(key, 0.0):.3f}" for key in ("p50_seconds", "p95_seconds", "max_seconds")]
            table.add_row(
                str(grader.get("name", "?")),
                str(grader.get("kind", "?")),
                str(grader["calls"]),
                str(grader["slow_calls"]),
                *numbers,
                str(grader["timeouts"]),
            )
        console.print(table)
    _print_facts(console, report)
    _print_controller(console, report)
    for note in report.missing:
        console.print(f"missing: {note}", markup=False)


def _role_table(report: Report) -> Table:
    table = Table(
        "role",
        "busy",
        "transfer",
        "waiting",
        "idle",
        "critical",
        "waits for",
        title=f"Seconds a step, by role (mean of {len(report.complete)} iterations)",
    )
    for entry in role_table(report):
        waiting = sum(entry["waiting"].values())
        table.add_row(
            entry["role"],
            f"{entry['busy']:.2f}",
            f"{entry['transfer']:.2f}",
            f"{waiting:.2f}",
            f"{entry['idle']:.2f}",
            f"{entry['path']:.2f}",
            waits_text(entry["waiting"]),
        )
    return table


def _print_controller(console: Console, report: Report) -> None:
    """What lay between iterations and what went through the controller, where iterations recorded it."""
    between = [s.facts["between_seconds"] for s in report.complete[1:] if "between_seconds" in s.facts]
    if between:
        mean = sum(between) / len(between)
        console.print(f"between iterations: {mean:.2f} s, at most {max(between):.2f} s (commit, snapshot, Prefect)")
    through = [summary.facts["controller_bytes"] for summary in report.complete if "controller_bytes" in summary.facts]
    if through:
        console.print(f"through the controller: at most {bytes_text(max(through))} an iteration")


def _print_facts(console: Console, report: Report) -> None:
    rows = [
        (role.role, {name: role.values[name] for name in _FACT_NAMES if name in role.values})
        for role in report.role_facts
    ]
    rows = [(role, values) for role, values in rows if values]
    if not rows:
        return
    names = [name for name in _FACT_NAMES if any(name in values for _, values in rows)]
    table = Table("role", *(name.replace("_", " ") for name in names), title="Of each rank, on average")
    for role, values in rows:
        table.add_row(role, *(f"{values[name]:,.3g}" if name in values else "" for name in names))
    console.print(table)


def render_prediction(
    prediction: Prediction,
    unchanged_seconds: float | None = None,
    measured_seconds: float | None = None,
    notes: Sequence[str] = (),
    width: int = 110,
) -> str:
    """One what-if as text, against the prediction of the layout as it was: the model errs in both alike."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(prediction.topology.describe(), markup=False)
        against = ""
        if unchanged_seconds:
            change = round(100 * (prediction.step_seconds / unchanged_seconds - 1))
            against = f" ({change:+d} % against {unchanged_seconds:.3f} s predicted for the layout as it was"
            against += f"; measured {measured_seconds:.3f} s)" if measured_seconds else ")"
        console.print(
            f"step {prediction.step_seconds:.3f} s{against}, {prediction.rows_per_second:.1f} responses/s",
            soft_wrap=True,
        )
        console.print(
            f"bottleneck {prediction.bottleneck}: {100 * prediction.bottleneck_share:.0f} % of the critical path"
        )
        table = Table("role", "busy s", "idle s")
        for role, seconds in prediction.busy_seconds.items():
            table.add_row(role, f"{seconds:.3f}", f"{prediction.idle_seconds[role]:.3f}")
        console.print(table)
        for note in prediction.assumptions:
            console.print(f"assumed: {note}", markup=False)
        for note in notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
    return capture.get()


def render_search(result: SearchResult, width: int = 110) -> str:
    """The best layouts as text."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as capture:
        table = Table("step s", "responses/s", "bottleneck", "layout")
        for found in result.alternatives:
            table.add_row(
                f"{found.step_seconds:.3f}", f"{found.rows_per_second:.1f}", found.bottleneck, found.topology.describe()
            )
        console.print(table)
        console.print(
            f"{result.num_tried} layouts tried in {result.seconds:.1f} s"
            + ("" if result.is_complete else "; the time limit ended the search")
        )
        for note in result.assumptions:
            console.print(f"assumed: {note}", markup=False, soft_wrap=True)
    return capture.get()
