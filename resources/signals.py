"""Holding back the signals that end a run while something must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run in good order: Ctrl-C, a scheduler, a terminal that goes away."""


def is_ignored(number: int) -> bool:
    """Whether the process was told to ignore it, as `nohup` does with SIGHUP; then it stays ignored."""
    return signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Deliver what ends a run at the end of the block instead of inside it, each once, also when the block raises.

    Signals reach Python in the main thread only; in any other thread nothing needs to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        if number not in came:
            came.append(number)

    handlers = {number: signal.signal(number, keep) for number in ENDING if not is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
