"""The content of `\\boxed{...}`."""

import re

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Content of the last complete box, braces matched; None when there is none.

    Two boxes are two answers and the later one stands: they are never joined. A box that was cut off before it closed
    is no answer.

    >>> last_boxed(r"first \\boxed{2} then \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    open_braces: list[int | None] = []  # where the content of a box starts, None for any other brace
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            open_braces.append(match.end())
        elif match["open"]:
            open_braces.append(None)
        elif match["close"] and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]
