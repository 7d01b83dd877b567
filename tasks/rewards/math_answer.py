"""Mathematical answers compared by math-verify.

Its own time limit is a signal, which works in the main thread alone and elsewhere fails silently; it is off here.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from tasks.rewards.boxed import last_boxed
from tasks.rewards.number_parsing import THIN_SEPARATOR
from tasks.rewards.score import Score

_RELATIVE_TOLERANCE = 1e-6
"""For numbers of which one is a decimal or irrational; rationals are compared exactly."""
_DIGITS = 30
"""Significant digits of a numeric comparison."""
_WORD = re.compile(r"[^\W\d_]{2}")


def math_answer(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """1 when the response's last box (or the last expression, without a box) equals the answer, else 0.

    Unscorable when the answer cannot be read. It may compute for ever (`10^{10^{10}}`) and sets no limit of its own:
    call it where a process can be ended, as the reward workers do after `timeout_seconds`.

    >>> math_answer("", r"so \\boxed{\\frac{2}{4}}", "1/2", {}).value
    1.0
    """
    import math_verify  # sympy takes a second to import; only where it is used

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off
    gold, got = _parse(answer, is_expression=True), _parse(response, is_expression=False)
    if not gold:
        return Score(None, f"math-verify reads nothing from the answer {answer!r:.60}")
    if not got:
        return Score(0.0, "no mathematical expression in the response")
    if not math_verify.verify(gold, got, timeout_seconds=0, raise_on_error=True):
        return Score(0.0)
    return Score(float(_is_same_number(gold[0], got[0])))


def _parse(text: str, *, is_expression: bool) -> list[Any]:
    import math_verify

    boxed = last_boxed(text)
    text = re.sub(r"\\\$", "", text if boxed is None else boxed)  # an escaped dollar is currency
    text = THIN_SEPARATOR.sub("", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    has_marks = any(mark in text for mark in ("$", "\\(", "\\["))
    if boxed is not None or (not has_marks and (is_expression or "\\" in text or _is_bare(text))):
        text = f"${text.strip().removesuffix('.')}$"
    return math_verify.parse(text, parsing_timeout=0, raise_on_error=True)


def _is_bare(text: str) -> bool:
    """Whether a text is an expression by itself, as `(1,2)` or `x^2+1`: it has no word."""
    return bool(text.strip()) and _WORD.search(text) is None


def _is_same_number(gold: Any, got: Any) -> bool:
    """What math-verify calls equal may be two numbers that agree to some decimal places, as 1/2004! and 1/2006! do."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(got, sympy.Expr)) or gold.free_symbols or got.free_symbols:
        return True
    gold, got = gold.doit(), got.doit()
    if gold.is_Rational and got.is_Rational:
        return bool(gold == got)
    difference, size = sympy.Abs(gold - got).evalf(_DIGITS), sympy.Abs(gold).evalf(_DIGITS)
    if not (difference.is_number and size.is_number) or difference.has(sympy.nan, sympy.zoo, sympy.oo):
        return True
    return bool(difference <= _RELATIVE_TOLERANCE * size)
