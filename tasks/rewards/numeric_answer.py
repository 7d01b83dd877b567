"""A number, or a list of numbers, found in a response and compared exactly.

Reads the last `\\boxed{...}`; else what follows the last `####`; else the last number in the text. Inside a box or
after `####` the whole expression must be numbers with units, so that `4\\sqrt(2)` is not taken for 4.
"""

from collections.abc import Mapping
from fractions import Fraction

from tasks.rewards.boxed import last_boxed
from tasks.rewards.number_parsing import last_number, parse_numbers
from tasks.rewards.score import Score

_MARK = "####"
"""What GSM8K puts before its answer."""


def numeric_answer(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """1 when the response's number (or list of numbers) equals the answer's, else 0.

    Numbers are exact: 0.5 equals 1/2 and `\\frac12`, and 0.333 does not equal 1/3. Signs count; thousands separators,
    currency, percent signs and units do not.

    >>> numeric_answer("", "so it is -3.", "#### -3", {}).value
    1.0
    """
    expected = extract_numbers(answer)
    if expected is None:
        return Score(None, f"the answer of this row holds no number: {answer!r:.60}")
    got = extract_numbers(response)
    if got is None:
        return Score(0.0, "no number in the response")
    return Score(float(got == expected))


def extract_numbers(text: str) -> list[Fraction] | None:
    """The numbers of the final answer in `text`; None when there are none.

    >>> extract_numbers(r"first \\boxed{2} then \\boxed{\\frac{1}{2}}")
    [Fraction(1, 2)]
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return parse_numbers(boxed)
    if _MARK in text:
        return parse_numbers(text.rsplit(_MARK, 1)[1].strip().split("\n")[0])
    return parse_numbers(text) or last_number(text)
