"""A calculator: whole numbers, fractions and brackets. It parses; it never evaluates Python."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_CHARACTERS = 200
"""Enough for homework; a sum of a million terms is no use and would take the interpreter's stack."""
MAX_DIGITS = 60


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: for example 12*(3+4)-5/2; a trailing = is allowed.
    """
    text = expression.strip().removesuffix("=").strip()
    if not text or len(text) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters; give 1 to {MAX_CHARACTERS}")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{text!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
            raise ValueError(f"the result has more than {MAX_DIGITS} digits")
        return value
    raise ValueError("only numbers, + - * / and brackets are known")
