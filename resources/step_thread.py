"""A thread for a user's code that is to be waited for no longer than so many seconds."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

Value = TypeVar("Value")


class StepThread:
    """Does what it is asked, one thing after another; work that never returns costs the thread and nothing else."""

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[[], Value], seconds: float) -> Value:
        """What `work` returns; it may not raise. Raises TimeoutError, and this thread is of no more use then."""
        self._asked.put(work)
        try:
            return cast("Value", self._answers.get(timeout=seconds))
        except queue.Empty:
            self.close()
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    def close(self) -> None:
        """End the thread once it has done what it was asked."""
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            self._answers.put(work())
