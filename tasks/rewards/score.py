"""What a grader says of one response, and the checks on what a user's function returned."""

import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy


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


def as_score(returned: object, grader: str) -> Score:
    """What one call of a user's function returned, as a Score.

    A finite number is a score; None, nan and inf are unscorable, with the reason.

    Raises:
        TypeError: anything else; naming the function, got and expected.
    """
    if isinstance(returned, Score):
        return returned if returned.value is None else _checked(float(returned.value), grader, returned.reason)
    if returned is None:
        return Score(None, f"{grader} returned None")
    if isinstance(returned, int) and abs(returned) > sys.float_info.max:
        return Score(None, f"{grader} returned a number too large for a float")
    if isinstance(returned, numbers.Real | numpy.bool_):
        return _checked(float(returned), grader, "")
    raise TypeError(
        f"grader {grader} returned {type(returned).__name__} {returned!r:.60}; expected a number, None or Score"
    )


def _checked(value: float, grader: str, reason: str) -> Score:
    return Score(value, reason) if math.isfinite(value) else Score(None, f"{grader} returned {value}")


def as_scores(returned: object, num_responses: int, grader: str) -> list[Score]:
    """What a function over many responses returned, as one Score for each of them.

    A list, tuple or array of `num_responses` entries; an array of shape (num_responses, 1) is squeezed. Nothing is
    broadcast.

    Raises:
        ValueError: another length or shape, or no sequence at all; naming the function, got and expected.
    """
    if isinstance(returned, list | tuple):
        values: list[object] = list(returned)
        got = f"{len(values)} scores"
    else:
        array = numpy.asarray(returned)
        got = f"{type(returned).__name__} of shape {array.shape}"
        values = array.reshape(-1).tolist() if array.shape in ((num_responses,), (num_responses, 1)) else []
    if len(values) != num_responses:
        raise ValueError(f"grader {grader} returned {got}; expected {num_responses}, one for each response")
    return [as_score(value, grader) for value in values]
