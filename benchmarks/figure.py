"""What a benchmark says: figures, each with its target; as a table or as a JSON object a line."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

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

    def to_json(self) -> dict[str, Any]:
        """As every benchmark's line."""
        return {**asdict(self), "ok": self.ok}


def text_of(line: Mapping[str, Any]) -> str:
    """A line of JSON as a person reads it; one without a value says by its name why there is none."""
    if line["value"] is None:
        return f"{line['name']}  FAILED"
    target = "" if line["target"] is None else f"{'<=' if line['better'] == 'lower' else '>='} {line['target']:g}"
    verdict = "" if line["target"] is None else ("ok" if line["ok"] else "MISSED")
    note = line.get("note", "")
    return f"{line['name']:44} {line['value']:12.4g} {line['unit']:8} {target:>10} {verdict:7} {note}".rstrip()


def report(figures: Iterable[Figure], as_json: bool) -> int:
    """Print them; the exit code: 0 when every target holds."""
    all_ok = True
    for figure in figures:
        all_ok &= figure.ok
        print(json.dumps(figure.to_json()) if as_json else text_of(figure.to_json()), flush=True)
    return 0 if all_ok else 1
