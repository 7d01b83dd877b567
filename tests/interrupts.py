"""For tests that interrupt a process of their own."""

import signal


def heed_interrupts() -> None:
    """As a shell starts a command; in the background of a script it would ignore SIGINT. For `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
