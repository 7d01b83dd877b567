"""One way to say why a configuration is refused: path, value, rule, way out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

_LONGEST_VALUE = 80
_SECRET = re.compile(
    r"(api_?key|[._-]key|(?<!per_)token|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE
)


class _Word:
    """A value that is not one: shown as its word, never quoted."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __repr__(self) -> str:
        return self.word


MISSING = _Word("missing")
UNSAID = _Word("")
"""The rule's own text already names the values."""


def as_written(value: object) -> str:
    """A value as a config has it: null, true, [] and names, where Python would say None, True, () and frozenset.

    >>> as_written((None, True, "a", frozenset({"b"})))
    "[null, true, 'a', ['b']]"
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        inside = cast("Mapping[object, object]", value).items()
        return "{" + ", ".join(f"{as_written(key)}: {as_written(one)}" for key, one in inside) + "}"
    if isinstance(value, set | frozenset):
        return "[" + ", ".join(sorted(map(as_written, cast("frozenset[object]", value)))) + "]"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_written, cast("Sequence[object]", value))) + "]"
    return repr(value)


@dataclass(frozen=True)
class Problem:
    """One reason why a configuration is refused.

    >>> print(Problem("rollout.group_size", 1, "grpo compares siblings", "set it to 2 or more"))
    rollout.group_size is 1; grpo compares siblings; set it to 2 or more
    """

    path: str
    value: object
    rule: str
    way_out: str = ""

    def __str__(self) -> str:
        head = f"{self.path}: " if self.value is UNSAID else f"{self.path} is {self._shown()}; "
        return head + self.rule + (f"; {self.way_out}" if self.way_out else "")

    def _shown(self) -> str:
        if self.value is not MISSING and _SECRET.search(self.path):
            return "(hidden)"
        text = as_written(self.value)
        return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


class ConfigError(ValueError):
    """The configuration is refused; `problems` holds every reason, and the text is the block a user reads."""

    def __init__(self, origin: str, problems: Sequence[Problem]) -> None:
        self.origin = origin
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{origin}: {count}", *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, tuple[Problem, ...]]]:
        """Exceptions are rebuilt from their text by default, which would lose the problems."""
        return ConfigError, (self.origin, self.problems)
