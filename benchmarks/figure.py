"""What a benchmark says: figures, each with its target; as a table or as a JSON object a line."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure. Without a target it is reported only, and is ok whatever it is."""

    name: str
    value: float
    unit: str
    target: float | None = None
    better: Better = "lower"
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the target holds; a value that is not a number holds none."""
        if self.target is None:
            return True
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def report(figures: Iterable[Figure], as_json: bool) -> int:
    """Print them; the exit code: 0 when every target holds."""
    all_ok = True
    for figure in figures:
        all_ok &= figure.ok
        if as_json:
            print(json.dumps({**asdict(figure), "ok": figure.ok}), flush=True)
            continue
        target = "" if figure.target is None else f"{'<=' if figure.better == 'lower' else '>='} {figure.target:g}"
        verdict = "" if figure.target is None else ("ok" if figure.ok else "MISSED")
        print(
            f"{figure.name:44} {figure.value:12.4g} {figure.unit:8} {target:>10} {verdict:7} {figure.note}", flush=True
        )
    return 0 if all_ok else 1
