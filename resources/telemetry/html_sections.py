"""The parts of the report's page that are no charts: the verdict, the roles, the graders, what else would help."""

from html import escape

from resources.telemetry.attribution import waits_text
from resources.telemetry.report import Report, role_table
from resources.telemetry.verdict import Verdict

PARTS = {"busy": "#2f6f9f", "transfer": "#8a5fb0", "waiting": "#e0b93b", "idle": "#e3e7ec"}
"""What a role's step is made of -> colour."""
ROLE_COLOURS = {
    "controller": "#9aa3ad", "rollout": "#2f6f9f", "reward": "#c2503a", "reference": "#6b9e52", "teacher": "#4aa3a1",
    "actor": "#d98032", "critic": "#8a5fb0", "advantage": "#b04a78", "env": "#7a6a58",
}  # fmt: skip
"""Role -> colour, in the order in which roles are shown."""


def role_rank(role: str) -> int:
    """Place of a role in charts and tables."""
    return list(ROLE_COLOURS).index(role) if role in ROLE_COLOURS else len(ROLE_COLOURS)


def summary_line(report: Report) -> str:
    """What the run was, under its name."""
    steps = sorted(summary.times.step_seconds for summary in report.complete)
    parts = [f"{len(steps)} iterations" if len(steps) != 1 else "1 iteration"]
    if steps:
        parts.append(f"median step of all {steps[len(steps) // 2]:.2f} s ({steps[0]:.2f} to {steps[-1]:.2f})")
    if report.run is not None and report.run.pools:
        placed: dict[str, list[str]] = {}
        for role, pool in report.run.roles.items():
            placed.setdefault(pool, []).append(role)
        parts += [f"{pool}[{report.run.pools[pool].ranks}]: {', '.join(roles)}" for pool, roles in placed.items()]
    return escape(" · ".join(parts))


def verdict_card(report: Report) -> str:
    """Who holds the step back, why, what to change; and what else would help."""
    verdict = report.verdict
    if verdict is None:
        return '<section class="card verdict"><p class="who">No iteration is complete: no verdict.</p></section>'
    if verdict.is_balanced:
        head, style = '<p class="who">balanced</p>', "verdict balanced"
    else:
        gain = f"up to -{100 * verdict.gain_fraction:.0f} % of the step"
        seconds = f"({verdict.gain_seconds:.2f} of {verdict.step_seconds:.2f} s{verdict.means_text})"
        head = (
            f'<p class="who">{escape(verdict.role)}: {escape(verdict.cause_text)}</p>'
            f'<p><span class="gain">{gain}</span> {seconds}</p>'
        )
        style = "verdict"
    return (
        f'<section class="card {style}">{head}<p>{escape(verdict.evidence_text)}</p>'
        f'<p class="change"><b>Change:</b> {escape(verdict.change)}</p>{_others(verdict)}</section>'
    )


def _others(verdict: Verdict) -> str:
    if not verdict.others:
        return ""
    step = max(1e-12, verdict.step_seconds)
    items = " · ".join(
        f"{escape(other.role)}: {escape(str(other.cause))} -{100 * other.gain_seconds / step:.0f} %"
        for other in verdict.others
    )
    return f'<p class="sub">What else would shorten the step: {items}</p>'


def roles_card(report: Report) -> str:
    """Each role's step as a bar and in seconds."""
    rows = []
    for entry in sorted(role_table(report), key=lambda entry: role_rank(entry["role"])):
        waiting = sum(entry["waiting"].values())
        values = {"busy": entry["busy"], "transfer": entry["transfer"], "waiting": waiting, "idle": entry["idle"]}
        total = max(1e-12, sum(values.values()))
        bar = "".join(
            f'<i style="width:{100 * value / total:.2f}%;background:{PARTS[part]}" title="{part} {value:.2f} s"></i>'
            for part, value in values.items()
        )
        numbers = "".join(f'<td class="n">{value:.2f}</td>' for value in (*values.values(), entry["path"]))
        rows.append(
            f'<tr><td class="name">{escape(entry["role"])}</td><td><div class="bar">{bar}</div></td>{numbers}'
            f'<td class="whom">{escape(waits_text(entry["waiting"]))}</td></tr>'
        )
    names = "".join(f'<th class="n">{name}</th>' for name in (*PARTS, "critical"))
    key = "".join(f'<i style="background:{colour}"></i>{part}' for part, colour in PARTS.items())
    return (
        '<section class="card"><h2>Seconds a step, by role (mean of all iterations)</h2>'
        f'<p class="key">{key}</p><div class="wide"><table><tr><th>role</th><th></th>{names}<th>waits for</th></tr>'
        f"{''.join(rows)}</table></div></section>"
    )


def graders_card(report: Report) -> str:
    """Latencies of the graders; nothing where none made a call."""
    if not report.graders:
        return ""
    rows = []
    for grader in report.graders:
        seconds = "".join(
            f'<td class="n">{grader.get(key, 0.0):.3f}</td>' for key in ("p50_seconds", "p95_seconds", "max_seconds")
        )
        counts = "".join(f'<td class="n">{grader[key]}</td>' for key in ("calls", "slow_calls", "timeouts"))
        names = f"<td>{escape(str(grader.get('name', '?')))}</td><td>{escape(str(grader.get('kind', '?')))}</td>"
        rows.append(f"<tr>{names}{counts}{seconds}</tr>")
    heads = "".join(f'<th class="n">{name}</th>' for name in ("calls", "slow", "time-outs", "p50 s", "p95 s", "max s"))
    return (
        '<section class="card"><h2>Graders, latencies of the slowest iteration</h2>'
        f"<table><tr><th>grader</th><th>kind</th>{heads}</tr>{''.join(rows)}</table></section>"
    )
