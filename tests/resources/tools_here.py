"""Tools for tests: importable by path."""

import time


def never(text: str) -> str:
    """Answer long after anybody waits.

    Args:
        text: anything.
    """
    time.sleep(60.0)
    return text
