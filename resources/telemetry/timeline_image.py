"""The roles x time picture of one iteration as SVG bytes: for artifacts and docs, without a browser."""

import base64
from html import escape

from resources.telemetry.timeline import Kind, Segment, TaskTimeline, Timeline

COLOURS: dict[Kind, str] = {
    Kind.EXECUTE: "#2f6f9f",
    Kind.FETCH: "#8a5fb0",
    Kind.SERIALIZE: "#c2503a",
    Kind.COLLECT: "#d98032",
    Kind.QUEUE: "#d9c24a",
    Kind.WEIGHTS: "#6b9e52",
    Kind.SCHEDULING: "#b5b5b5",
}
_WIDTH, _LEFT, _ROW, _TOP = 960, 130, 26, 46


def timeline_svg(timeline: Timeline, title: str = "", path: list[Segment] | None = None) -> bytes:
    """SVG of the iteration: a row a role, segments by kind, the critical path underlined."""
    rows = {row: [] for row in dict.fromkeys(task.role for task in timeline.tasks.values())}
    for task in timeline.tasks.values():
        for segment in task.segments:
            rows.setdefault(row_of(task, segment), []).append(segment)
    height = _TOP + _ROW * len(rows) + 40
    scale = (_WIDTH - _LEFT - 20) / max(timeline.step_seconds, 1e-9)
    shapes = [f'<text x="8" y="18" font-size="14">{escape(title)}</text>', *_legend()]
    on_path = {(segment.task, segment.kind) for segment in path or ()}
    for row, (role, segments) in enumerate(rows.items()):
        y = _TOP + row * _ROW
        shapes.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(role)}</text>')
        shapes += [_bar(s, timeline.start, scale, y, (s.task, s.kind) in on_path) for s in segments]
    shapes += _axis(timeline.step_seconds, scale, _TOP + _ROW * len(rows) + 4)
    style = "font-family:sans-serif;font-size:11px"
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">'
    return f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{"".join(shapes)}</svg>'.encode()


def row_of(task: TaskTimeline, segment: Segment) -> str:
    """Whose row a segment stands in: a gap before a task in the task's own, work in that of whoever did it."""
    return segment.role if segment.kind is Kind.EXECUTE else task.role


def _bar(segment: Segment, start: float, scale: float, y: int, is_on_path: bool) -> str:
    x, width = _LEFT + (segment.start - start) * scale, max(0.5, segment.seconds * scale)
    tip = f"<title>{escape(segment.task)}: {segment.kind} {segment.seconds:.3f} s</title>"
    bar = f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="16" fill="{COLOURS[segment.kind]}">{tip}</rect>'
    return bar + (
        f'<rect x="{x:.1f}" y="{y + 20}" width="{width:.1f}" height="3" fill="#c2262e"/>' if is_on_path else ""
    )


def _legend() -> list[str]:
    shapes, x = [], _LEFT
    for kind, colour in COLOURS.items():
        shapes.append(
            f'<rect x="{x}" y="27" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="36">{kind}</text>'
        )
        x += 30 + 7 * len(kind)
    return [
        *shapes,
        f'<rect x="{x}" y="31" width="10" height="3" fill="#c2262e"/><text x="{x + 14}" y="36">critical path</text>',
    ]


def _axis(seconds: float, scale: float, y: int) -> list[str]:
    shapes = [f'<line x1="{_LEFT}" x2="{_LEFT + seconds * scale:.1f}" y1="{y}" y2="{y}" stroke="#333"/>']
    for tick in range(6):
        at = seconds * tick / 5
        x = _LEFT + at * scale
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#333"/>')
        shapes.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{at:.2f} s</text>')
    return shapes


def timeline_data_uri(timeline: Timeline, title: str = "", path: list[Segment] | None = None) -> str:
    """The picture as a `data:` URI, which an image artifact or a Markdown page shows without a server."""
    return "data:image/svg+xml;base64," + base64.b64encode(timeline_svg(timeline, title, path)).decode()
