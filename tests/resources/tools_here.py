"""Tools for tests: importable by path."""

import threading
import time


def never(text: str) -> str:
    """Answer long after anybody waits.

    Args:
        text: anything.
    """
    time.sleep(60.0)
    return text


_TURN = threading.Lock()


def in_turn(text: str) -> str:
    """Answer half a second after the call before.

    Args:
        text: anything.
    """
    with _TURN:
        time.sleep(0.5)
    return text
