"""A learning curve as SVG text: no plotting library, no script, small enough to live in an artifact."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 34
COLORS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df")


@dataclass(kw_only=True)
class Series:
    """One metric over the iterations.

    >>> series = Series(name="x")
    >>> for number in range(5): series.add(number, float(number), most=4)
    >>> series.iterations
    [0, 2, 4]
    """

    name: str
    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, iteration: int, value: float, most: int) -> None:
        """Append; beyond `most` points every second one goes, and the newest always stays."""
        if self.iterations and iteration <= self.iterations[-1]:  # an iteration that runs again
            keep = sum(1 for number in self.iterations if number < iteration)
            del self.iterations[keep:], self.values[keep:]
        self.iterations.append(iteration)
        self.values.append(value)
        if len(self.values) > most:
            last = (len(self.values) - 1) % 2
            self.iterations[:] = self.iterations[last::2]
            self.values[:] = self.values[last::2]


def curve_svg(series: Sequence[Series]) -> str:
    """Lines of all `series` on common axes, with a legend. Raises ValueError when there is no point at all."""
    points = [value for one in series for value in one.values]
    if not points:
        raise ValueError("no series has a point; draw the curve after the first iteration")
    low, high = min(points), max(points)
    pad = (high - low) * 0.05 or max(abs(high) * 0.05, 0.05)
    low, high = low - pad, high + pad
    last = max(max(one.iterations, default=0) for one in series) or 1

    def at(iteration: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * iteration / last
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines, legend = [], []
    for place, one in enumerate(series):
        color = COLORS[place % len(COLORS)]
        path = " ".join(at(number, value) for number, value in zip(one.iterations, one.values, strict=True))
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        x = LEFT + 8 + 210 * place
        legend.append(f'<text x="{x}" y="{HEIGHT - 6}" fill="{color}">{escape(one.name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{_grid(low, high, last)}{''.join(lines)}{''.join(legend)}</svg>"
    )


def _grid(low: float, high: float, last: int) -> str:
    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - step / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{value:.3g}</text>')
    ticks = min(4, last)
    for step in range(ticks + 1):
        number = round(last * step / ticks)
        x = LEFT + (WIDTH - LEFT - RIGHT) * number / last
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle" fill="#555555">{number}</text>'
        )
    return "".join(parts)
