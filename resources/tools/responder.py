"""Tools as the answering side of an episode: each call in a thread of its own, with a deadline."""

import queue
import threading
import time
from collections.abc import Mapping, Sequence

from resources.agent_loop import Answer, Turn
from resources.tools.calls import Notation, ToolCall, find_calls, make_call
from resources.tools.schema import Tool

MAX_CALLS = 8
"""Of one turn; further ones are told that they were not made."""


MOST_DEADLINES = 3
"""Deadlines of a call that all calls of an answer may take together; the policy's side waits for four."""

Box = queue.SimpleQueue[tuple[tuple[str, bool], float]]
"""Where a call's thread puts what it made, and when."""


class ToolResponder:
    """Makes the calls found in a turn. Whatever goes wrong becomes a text that the policy reads."""

    def __init__(self, tools: Mapping[str, Tool], notation: Notation, timeout_seconds: float) -> None:
        self.tools, self.timeout_seconds = dict(tools), timeout_seconds
        self.notation: Notation = notation

    def wants(self, text: str) -> bool:
        """Whether the turn holds a call, or what was meant to be one."""
        return bool(find_calls(text, self.notation, self.tools))

    def respond(self, turns: Sequence[Turn]) -> list[Answer]:
        """All calls of all turns side by side: as many as hang, they are waited for once.

        The deadline of one call counts from the last answer, since many share the cores; all of them together have
        MOST_DEADLINES of it.
        """
        waiting = [[self._start(call) for call in self._calls(turn)] for turn in turns]
        patience = _Patience(self.timeout_seconds)
        return [self._collect(calls, patience) for calls in waiting]

    def _calls(self, turn: Turn) -> list[ToolCall]:
        found = find_calls(turn.text, self.notation, self.tools)
        late = [
            ToolCall(name=call.name, problem=f"only {MAX_CALLS} calls a turn are made") for call in found[MAX_CALLS:]
        ]
        return [*found[:MAX_CALLS], *late]

    def _start(self, call: ToolCall) -> "Box":
        """A daemon thread: a tool that never returns costs a thread and nothing else."""
        box: Box = queue.SimpleQueue()
        threading.Thread(
            target=lambda: box.put((make_call(call, self.tools), time.monotonic())),
            name=f"tool-{call.name}",
            daemon=True,
        ).start()
        return box

    def _collect(self, calls: "Sequence[Box]", patience: "_Patience") -> Answer:
        results: list[tuple[str, bool]] = []
        for box in calls:
            try:
                result, at = box.get(timeout=patience.left())
                patience.heard(at)
                results.append(result)
            except queue.Empty:
                results.append((f"error: no answer within {self.timeout_seconds:g} s", False))
        return Answer(
            texts=tuple(text for text, _ in results),
            is_last=not results,
            num_calls=len(results),
            num_errors=sum(not is_result for _, is_result in results),
        )


class _Patience:
    """How long the next answer is waited for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._heard = time.monotonic()
        self._end = self._heard + MOST_DEADLINES * seconds

    def heard(self, at: float) -> None:
        """A call ended then."""
        self._heard = max(self._heard, at)

    def left(self) -> float:
        """Seconds until the calls that have not ended are given up."""
        return max(0.0, min(self._heard + self._seconds, self._end) - time.monotonic())
