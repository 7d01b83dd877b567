"""From text to exact numbers: signs, separators, fractions, powers of ten, currency and units.

`parse_numbers` wants the whole expression to be numbers; `last_number` looks for the last one in running text.
"""

import re
import unicodedata
from fractions import Fraction

_MAX_CHARACTERS = 1000
"""Longer numbers are refused, so that a response cannot make the grader build huge integers."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!\d)|(?=\.\d))(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?"
_ARGUMENT = rf"(?:\{{\s*-?{_DECIMAL}\s*\}}|\d)"
_TIMES = "(?:\\\\times|\\\\cdot|\N{MULTIPLICATION SIGN}|\\*)"
_EXPONENT = r"-?\d{1,3}|\{\s*-?\d{1,3}\s*\}"
_NUMBER = re.compile(
    rf"""(?:(?P<sign>[+-])\s?)?(?:[$€£¥]\s?)?(?P<inner_sign>[+-]?)
    (?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?=\d+/\d)))?                      # of a mixed number
    (?:\\frac\s*(?P<top>{_ARGUMENT})\s*(?P<bottom>{_ARGUMENT})
      |(?P<over>{_DECIMAL})\s?/\s?(?P<under>-?{_DECIMAL})
      |(?P<decimal>{_DECIMAL})(?:\s*{_TIMES}\s*10\s*\^\s*(?P<power>{_EXPONENT}))?
    )""",
    re.VERBOSE,
)
_LETTERS = re.compile(r"[^\W\d_]+")
_UNIT = re.compile(r"\s*(?P<words>[^\W\d_][^\d\\(),;=+*^]*(?:\^\{?[23]\}?)?)?\s*")
_NOT_A_UNIT = re.compile(r"(?![mgshlLAVWNJKCF]$)[^\W\d_]$|pi\b|e\b|i\b")
"""A lone letter that is no unit is a variable, and 3pi is not 3."""

_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_IGNORED = re.compile(r"\\left|\\right|\\[,;!: ]|\\[()\[\]]|\\?%|\^\s*\{?\s*\\circ\s*\}?|°")
_MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{NO-BREAK SPACE}": " ", "~": " "})
THIN_SEPARATOR = re.compile(r"(?<=\d)(?:\\[,;:! ]|[\u00a0\u2007\u2009\u202f~])(?=\d{3}(?!\d))")
"""Between the thousands of one number, `12\\,345`: a space that does not break."""
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_NAMED = re.compile(r"\s*(?:[^\W\d_]\w*\s*)?=\s*")
_LIST = re.compile(r"\\?[\[({](.*?)\\?[\])}]", re.DOTALL)

_LOOK_BACK = 20
"""Characters before a number that tell whether it stands inside an expression."""
_BINARY_SIGN_FOLLOWS = re.compile(r"(?:[\w)}]|[\d)}]\s)$")
_FUNCTION = r"\\(?:sqrt|log|ln|lg|exp|sin|cos|tan|cot|sec|csc)(?:_\{?\w+\}?)?\s*"
_INSIDE_EXPRESSION = re.compile(rf"(?:[\w.]|\\[a-zA-Z]+\s*[\[({{]|[a-zA-Z][\[({{]|[\^_]\{{?|{_FUNCTION})$")
_EXPRESSION_FOLLOWS = re.compile(r"\s*(?:\\(?:sqrt|pi|cdot|times|log|sin|cos|tan)|[\^!(])")


def parse_numbers(expression: str) -> list[Fraction] | None:
    """The numbers that `expression` consists of; None when it is anything else.

    A comma is a thousands separator where it can be one (`1,234`), and separates where it cannot (`1,2,3`) or where
    brackets say that this is a list (`[100,200]`).

    >>> parse_numbers("[8.124,12.852]") == parse_numbers("8.124, 12.852")
    True
    >>> parse_numbers("1,234"), parse_numbers("1,2,3")
    ([Fraction(1234, 1)], [Fraction(1, 1), Fraction(2, 1), Fraction(3, 1)])
    """
    text = _clean(expression)
    named = _NAMED.match(text)
    text = text[named.end() if named else 0 :].removesuffix(".").strip()
    bracketed = _LIST.fullmatch(text)
    if bracketed:
        return _parse_each(bracketed.group(1).split(","))
    return (
        _parse_each([text])
        or _parse_each(re.split(r",\s+(?:and\s+)?|;|\s+and\s+", text))
        or _parse_each(text.split(","))
    )


def last_number(text: str) -> list[Fraction] | None:
    """The last number, or bracketed list of numbers, in running text; parts of larger expressions do not count.

    >>> last_number("We get 5 - 3 = 2, so $2.50 each.")
    [Fraction(5, 2)]
    """
    text = _clean(text)
    for match in reversed(list(_NUMBER.finditer(text))):
        start, before = match.start(), text[max(0, match.start() - _LOOK_BACK) : match.start()]
        if match["sign"] and _BINARY_SIGN_FOLLOWS.search(before):
            start, before = start + 1, before + match["sign"]
        if _INSIDE_EXPRESSION.search(before) or _EXPRESSION_FOLLOWS.match(text, match.end()):
            continue
        number = _NUMBER.fullmatch(text[start : match.end()].lstrip())
        value = _value(number) if number and not _is_variable(text, match.end()) else None
        if value is not None:
            enclosing = [found for found in re.finditer(r"\[[^\[\]]*\]", text) if found.start() < start < found.end()]
            as_list = parse_numbers(enclosing[-1].group()) if enclosing else None
            return as_list or [value]
    return None


def _clean(text: str) -> str:
    text = _VULGAR_FRACTION.sub(lambda found: " " + unicodedata.normalize("NFKC", found.group()), text)
    text = THIN_SEPARATOR.sub("", text.replace("\N{FRACTION SLASH}", "/"))
    text = text.translate(_MINUS_SIGNS).replace("\\$", "$").replace("{,}", ",").replace(",\\!", ",").replace("{}", "")
    text = re.sub(r"\\[dtc]frac", r"\\frac", _WRAPPERS.sub(r" \1 ", text))
    return " ".join(_IGNORED.sub(" ", text).split())


def _parse_each(parts: list[str]) -> list[Fraction] | None:
    values = [_parse_one(part.strip().strip("$").strip()) for part in parts]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _parse_one(text: str) -> Fraction | None:
    number = _NUMBER.match(text)
    if number is None:
        return None
    unit = _UNIT.fullmatch(text, number.end())
    if unit is None or (unit["words"] and _NOT_A_UNIT.match(unit["words"].strip())):
        return None
    return _value(number)


def _is_variable(text: str, position: int) -> bool:
    letters = _LETTERS.match(text, position)
    return letters is not None and _NOT_A_UNIT.match(letters.group()) is not None


def _value(number: re.Match[str]) -> Fraction | None:
    if len(number.group()) > _MAX_CHARACTERS or (number["sign"] and number["inner_sign"]):
        return None
    if number["decimal"] is not None:
        value = _decimal(number["decimal"]) * Fraction(10) ** int((number["power"] or "0").strip("{} "))
    else:
        top, bottom = (number["top"], number["bottom"]) if number["top"] else (number["over"], number["under"])
        if _decimal(bottom) == 0:
            return None
        value = _decimal(top) / _decimal(bottom)
    value += int(number["whole"] or 0)
    return -value if "-" in (number["sign"], number["inner_sign"]) else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.strip("{} ").replace(",", ""))
