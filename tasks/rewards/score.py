"""What a grader says of one response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A number, or None with the reason why there is none.

    None is not 0: an unscorable row is left out of baselines and losses and counted. 0 says "looked at, and wrong".

    >>> Score(1.0), Score(None, "grader error: KeyError: 'entry'")
    (Score(value=1.0, reason=''), Score(value=None, reason="grader error: KeyError: 'entry'"))
    """

    value: float | None
    reason: str = ""


Grader = Callable[[str, str, str, Mapping[str, object]], Score]
"""(prompt, response, answer, extra) -> Score. `response` is the text the policy wrote, without tool output."""
