"""Small line charts as SVG text, for docs: a few series over a common axis, without a plotting library."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 56
COLOURS = ("#2f6f9f", "#c2503a", "#6b9e52", "#8a5fb0", "#d98032")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: a name, and its points in ascending x."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, logarithmic: bool = False, dots: bool = True
) -> str:
    """The chart as SVG. The y axis starts at 0; `logarithmic` spaces x by powers of two."""
    place = (lambda x: math.log2(max(x, 1e-9))) if logarithmic else float
    xs = [place(x) for one in series for x, _ in one.points]
    low, high = min(xs), max(xs)
    top = _round_up(max(y for one in series for _, y in one.points))

    def at(x: float, y: float) -> tuple[float, float]:
        share = (place(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    shapes = [f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>', *_y_axis(top, y_label)]
    ticks = sorted({x for one in series for x, _ in one.points})
    shapes += _x_axis(_thinned(ticks), at, x_label)
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(x, y) for x, y in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if dots:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places]
        if len(series) > 1:
            x = LEFT + number * (WIDTH - LEFT - RIGHT) / len(series)
            shapes.append(f'<text x="{x:.0f}" y="{HEIGHT - 6}" fill="{colour}">{escape(one.name)}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="font-family:sans-serif;font-size:11px">'
    return f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{"".join(shapes)}</svg>\n'


def _thinned(ticks: Sequence[float]) -> list[float]:
    """At most seven of them, first and last among them."""
    step = max(1, math.ceil((len(ticks) - 1) / 6))
    return [*ticks[:-1:step], ticks[-1]]


def _round_up(y: float) -> float:
    """The next 1, 2 or 5 times a power of ten.

    >>> _round_up(0.031), _round_up(7.0)
    (0.05, 10.0)
    """
    if y <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(y))
    return next(round(power * step, 12) for step in (1, 2, 5, 10) if power * step >= y)


def _y_axis(top: float, label: str) -> list[str]:
    shapes = [f'<text x="{LEFT - 50}" y="{TOP - 6}" font-size="10">{escape(label)}</text>']
    for tick in range(5):
        y = HEIGHT - BOTTOM - tick / 4 * (HEIGHT - TOP - BOTTOM)
        shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * tick / 4:g}</text>')
    return shapes


def _x_axis(ticks: Sequence[float], at: Callable[[float, float], tuple[float, float]], label: str) -> list[str]:
    y = HEIGHT - BOTTOM
    shapes = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#333333"/>']
    for tick in ticks:
        x = at(tick, 0.0)[0]
        shapes.append(f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*shapes, f'<text x="{middle:.0f}" y="{y + 31}" text-anchor="middle">{escape(label)}</text>']
