"""Signals that end a run wait until what must be whole is whole."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from resources.signals import held_signals


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A process that was started in the background of a script ignores SIGINT from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(steps: list[str], error: Exception | None = None) -> None:
    """A block that is interrupted twice, and raises `error`, if given."""
    with held_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        if error is not None:
            raise error
        steps.append("whole")
    steps.append("after")


def test_an_interrupt_is_delivered_at_the_end_of_the_block():
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(steps)
    assert steps == ["whole"]


def test_the_handlers_from_before_are_back_afterwards():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with held_signals():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_an_error_of_the_block_does_not_swallow_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([], ValueError("of the block"))
    assert isinstance(caught.value.__context__, ValueError)


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a process
    try:
        with held_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_need_no_holding():
    found: list[object] = []

    def body() -> None:
        with held_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert found == [signal.getsignal(signal.SIGINT)]
