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
from resources.telemetry.html_sections import (
    ROLE_COLOURS,
    graders_card,
    role_rank,
    roles_card,
    summary_line,
    verdict_card,
)
from resources.telemetry.report import IterationDetail, Report
from resources.telemetry.spans import CONTROLLER
from resources.telemetry.timeline import Kind
from resources.telemetry.timeline_image import COLOURS, row_of

_HALVES = ("lengths", "tail")
"""Charts that stand side by side."""
_OTHER = "#7d7d7d"
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
    cards = {
        name: f'<section class="card"><h2>{escape(figure["title"])}</h2><div id="{name}" class="chart"></div></section>'
        for name, figure in figures.items()
    }
    halves = "".join(cards.pop(name) for name in _HALVES if name in cards)
    page = PAGE.format(
        policy=_POLICY,
        title=escape(report.run_dir.name),
        plotly=_script(),
        summary=summary_line(report),
        verdict=verdict_card(report),
        roles=roles_card(report),
        sections="".join(cards.values()) + (f'<div class="pair">{halves}</div>' if halves else ""),
        graders=graders_card(report),
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


def _figures(report: Report) -> dict[str, Figure]:
    figures = {f"gantt-{detail.why}": _gantt(detail) for detail in report.details}
    figures["bars"] = _bars(report)
    figures["curves"] = _curves(report)
    figures["lengths"] = _lengths(report)
    figures["tail"] = _tail(report)
    return figures


def _gantt(detail: IterationDetail) -> Figure:
    """Horizontal bars, one trace a kind of segment; the critical path as a line on its bars.

    The controller's row has what lies before the first submission; a gap before a task stands in that task's row.
    """
    begin = detail.timeline.start
    by_kind: dict[Kind, dict[str, list[Any]]] = {}
    for task in detail.timeline.tasks.values():
        for segment in task.segments:
            is_before = segment.kind is Kind.SCHEDULING and segment.start <= begin
            trace = by_kind.setdefault(segment.kind, {"y": [], "x": [], "base": [], "text": []})
            trace["y"].append(CONTROLLER if is_before else row_of(task, segment))
            trace["x"].append(segment.seconds)
            trace["base"].append(segment.start - begin)
            trace["text"].append("between iterations" if is_before else task.key)
    rows = {row for trace in by_kind.values() for row in trace["y"]}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": str(kind),
            "marker": {"color": COLOURS[kind]},
            "textposition": "none",
            "hovertemplate": "%{text}: %{x:.3f} s from %{base:.3f} s",
            **by_kind[kind],
        }
        for kind in COLOURS
        if kind in by_kind
    ]
    path = [(s.start - begin, s.end - begin, s.role) for s in detail.times.path if s.role in rows]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "critical path",
            "x": [x for start, end, _ in path for x in (start, end, None)],
            "y": [y for *_, role in path for y in (role, role, None)],
            "line": {"color": "#c2262e", "width": 3},
            "hoverinfo": "skip",
        }
    )
    order = sorted(rows, key=role_rank)
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": order},
    }
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
            "marker": {"color": ROLE_COLOURS.get(role, _OTHER)},
            "text": text,
            "textposition": "none",
            "hovertemplate": "%{x}: %{y:.3f} s<br>%{text}",
        }
        for role, values in sorted(by_role.items(), key=lambda item: role_rank(item[0]))
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "iteration"}},
        "yaxis": {"title": {"text": "seconds on the critical path"}},
    }
    return {"title": "Where each step's time went", "data": data, "layout": layout}


def _curves(report: Report) -> Figure:
    """Learning curves; the first ones shown, the rest a click away in the legend."""
    first = ("reward/score_mean", "validation/", "reward/", "actor/", "critic/", "rollout/")
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
    layout = {"xaxis": {"title": {"text": "iteration"}}, "legend": {"orientation": "v"}, "showlegend": True}
    return {"title": "Learning curves (more in the legend)", "data": data, "layout": layout}


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
