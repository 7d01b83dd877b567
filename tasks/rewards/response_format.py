"""Whether a response has the form that was asked for."""

import re
from collections.abc import Mapping

from tasks.rewards.score import Score

_NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"\s*<think>{_NO_TAG}</think>\s*<answer>{_NO_TAG}</answer>\s*"
"""One block of thought, one answer, and nothing else: a second block inside either is one too many."""

CUT = "length"
"""The finish reason of a response that ran into the length limit."""


def response_format(
    prompt: str,
    response: str,
    answer: str,
    extra: Mapping[str, object],
    *,
    pattern: str = THINK_THEN_ANSWER,
    truncated_score: float | None = None,
) -> Score:
    """1 when the whole response matches `pattern` (`.` matches newlines), else 0.

    A response cut at the length limit (`extra["finish_reason"]` is "length") that does not match is no format error: it
    gets `truncated_score` and the reason "truncated", which by default leaves the row out. A match is a match, however
    the response ended and however full its context is.
    """
    if re.fullmatch(pattern, response, flags=re.DOTALL):
        return Score(1.0)
    if extra.get("finish_reason") == CUT:
        return Score(truncated_score, "truncated")
    return Score(0.0, "format")
