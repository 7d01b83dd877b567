"""The report as one HTML page that needs no network: plotly's script inside, and a policy against any request.

Charts: roles x time, stacked bars per iteration, learning curves, response lengths, long tail; tables: roles, samples.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from resources.samples import TOKEN_FIELDS
from resources.telemetry.html_page import PAGE
from resources.telemetry.report import IterationDetail, Report, role_table
from resources.telemetry.timeline_image import COLOURS

_PARTS = {"busy": "#2f6f9f", "transfer": "#8a5fb0", "waiting": "#d9c24a", "idle": "#dddddd"}
_PALETTE = ("#2f6f9f", "#c2503a", "#6b9e52", "#8a5fb0", "#d98032", "#4aa3a1", "#b04a78", "#7d7d7d")
_MAX_CURVES = 24
_MAX_BARS = 400
"""Iterations in the stacked bars; of more, an even selection is drawn."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:"
)

Figure = dict[str, Any]


@lru_cache(maxsize=1)
def _script() -> str:
    """Plotly's script without the addresses it carries for maps and in comments; names of XML namespaces stay."""
    return re.sub(r"https?://(?!www\.w3\.org/)", "", get_plotlyjs()).replace("</script", "<\\/script")


def render_html(report: Report, path: Path) -> None:
    """Writes the page to `path`."""
    figures = {name: figure for name, figure in _figures(report).items() if figure["data"]}
    sections = "".join(
        f'<section><h2>{escape(figure["title"])}</h2><div id="{name}" class="chart"></div></section>'
        for name, figure in figures.items()
    )
    page = PAGE.format(
        policy=_POLICY,
        title=escape(report.run_dir.name),
        plotly=_script(),
        verdict=_verdict(report),
        roles=_roles(report),
        sections=sections,
        missing="".join(f"<li>{escape(note)}</li>" for note in report.missing) or "<li>nothing</li>",
        figures=_embedded(figures),
        samples=_embedded([_plain(sample) for sample in report.samples]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _embedded(value: object) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")


def _plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        if isinstance(value, int | float | str | bool) or value is None or key in TOKEN_FIELDS
        else str(value)
        for key, value in sample.items()
    }
    return {key: None if isinstance(value, float) and value != value else value for key, value in kept.items()}


def _verdict(report: Report) -> str:
    if report.verdict is None:
        return "<p>No iteration is complete: no verdict.</p>"
    step = max(1e-12, report.verdict.step_seconds)
    others = "".join(
        f"<li>{escape(other.role)}: {escape(str(other.cause))}, -{100 * other.gain_seconds / step:.0f} %</li>"
        for other in report.verdict.others
    )
    listed = f"<p>What else would shorten the step:</p><ul>{others}</ul>" if others else ""
    return f'<p class="verdict">{escape(report.verdict.line)}</p><p>Change: {escape(report.verdict.change)}</p>{listed}'


def _roles(report: Report) -> str:
    rows = []
    for entry in role_table(report):
        whom = ", ".join(
            f"{escape(name)} {seconds:.2f}" for name, seconds in entry["waiting"].items() if seconds >= 0.005
        )
        numbers = (entry["busy"], entry["transfer"], sum(entry["waiting"].values()), entry["idle"], entry["path"])
        cells = "".join(f"<td>{number:.2f}</td>" for number in numbers)
        rows.append(f"<tr><td>{escape(entry['role'])}</td>{cells}<td>{whom}</td></tr>")
    head = "".join(
        f"<th>{name}</th>"
        for name in ("role", "busy s", "transfer s", "waiting s", "idle s", "on the critical path s", "waits for")
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _figures(report: Report) -> dict[str, Figure]:
    figures = {f"gantt-{detail.why}": _gantt(detail) for detail in report.details}
    figures["bars"] = _bars(report)
    figures["curves"] = _curves(report)
    figures["lengths"] = _lengths(report)
    figures["tail"] = _tail(report)
    return figures


def _gantt(detail: IterationDetail) -> Figure:
    """Horizontal bars, one trace a kind of segment; the critical path as a line under its bars."""
    by_kind: dict[str, dict[str, list[Any]]] = {}
    for task in detail.timeline.tasks.values():
        for segment in task.segments:
            trace = by_kind.setdefault(str(segment.kind), {"y": [], "x": [], "base": [], "text": []})
            trace["y"].append(task.role)
            trace["x"].append(segment.seconds)
            trace["base"].append(segment.start - detail.timeline.start)
            trace["text"].append(task.key)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "marker": {"color": COLOURS[kind]},
            "textposition": "none",
            "hovertemplate": "%{text}: %{x:.3f} s from %{base:.3f} s",
            **by_kind[name],
        }
        for kind, name in ((kind, str(kind)) for kind in COLOURS)
        if name in by_kind
    ]
    path = [
        (s.start - detail.timeline.start, s.end - detail.timeline.start, s.role)
        for s in detail.times.path
        if s.role in {t.role for t in detail.timeline.tasks.values()}
    ]
    xs: list[float | None] = [x for begin, end, _ in path for x in (begin, end, None)]
    ys: list[str | None] = [y for *_, role in path for y in (role, role, None)]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "critical path",
            "x": xs,
            "y": ys,
            "line": {"color": "#c2262e", "width": 3},
            "hoverinfo": "skip",
        }
    )
    layout = {"barmode": "overlay", "xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed"}}
    return {
        "title": f"Roles over time: {detail.why} iteration ({detail.times.iteration})",
        "data": data,
        "layout": layout,
    }


def _bars(report: Report) -> Figure:
    """Critical path of each iteration, stacked by role: what its step was made of."""
    chosen = list(report.complete)
    if len(chosen) > _MAX_BARS:
        chosen = [chosen[index * len(chosen) // _MAX_BARS] for index in range(_MAX_BARS)]
    by_role: dict[str, list[float]] = {}
    for index, summary in enumerate(chosen):
        for (role, _), seconds in summary.path_seconds.items():
            by_role.setdefault(role, [0.0] * len(chosen))[index] += seconds
    x = [summary.times.iteration for summary in chosen]
    text = [summary.verdict.line[:120] for summary in chosen]
    data = [
        {
            "type": "bar",
            "name": role,
            "x": x,
            "y": [round(value, 6) for value in values],
            "marker": {"color": _PALETTE[i % len(_PALETTE)]},
            "text": text,
            "textposition": "none",
            "hovertemplate": "%{x}: %{y:.3f} s<br>%{text}",
        }
        for i, (role, values) in enumerate(by_role.items())
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "iteration"}},
        "yaxis": {"title": {"text": "seconds on the critical path"}},
    }
    return {"title": "Where each step's time went", "data": data, "layout": layout}


def _curves(report: Report) -> Figure:
    """Learning curves; the first ones shown, the rest a click away in the legend."""
    first = ("reward/", "validation/", "actor/", "critic/", "rollout/")
    names = sorted(
        report.metrics,
        key=lambda name: (next((i for i, p in enumerate(first) if name.startswith(p)), len(first)), name),
    )
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [i for i, _ in report.metrics[name]],
            "y": [v for _, v in report.metrics[name]],
            "visible": True if index < 1 else "legendonly",
        }
        for index, name in enumerate(names[:_MAX_CURVES])
    ]
    return {"title": "Learning curves", "data": data, "layout": {"xaxis": {"title": {"text": "iteration"}}}}


def _lengths(report: Report) -> Figure:
    edges = list(report.length_histogram)
    data = (
        [
            {
                "type": "bar",
                "x": [str(edge) for edge in edges],
                "y": list(report.length_histogram.values()),
                "marker": {"color": "#2f6f9f"},
            }
        ]
        if edges
        else []
    )
    layout = {
        "xaxis": {"title": {"text": "tokens (lower edge)"}, "type": "category"},
        "yaxis": {"title": {"text": "responses"}},
        "bargap": 0.02,
    }
    return {"title": "Response lengths", "data": data, "layout": layout}


def _tail(report: Report) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv"},
            "name": f"{name} ({slots} slots)",
            "x": [t for t, _ in series],
            "y": [n for _, n in series],
        }
        for name, slots, series in report.running[:64]
    ]
    layout = {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"title": {"text": "sequences running"}}}
    return {"title": "Long tail: sequences running in each engine", "data": data, "layout": layout}
