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


class ToolResponder:
    """Makes the calls found in a turn. Whatever goes wrong becomes a text that the policy reads."""

    def __init__(self, tools: Mapping[str, Tool], notation: Notation, timeout_seconds: float) -> None:
        self.tools, self.timeout_seconds = dict(tools), timeout_seconds
        self.notation: Notation = notation

    def wants(self, text: str) -> bool:
        """Whether the turn holds a call, or what was meant to be one."""
        return bool(find_calls(text, self.notation, self.tools))

    def respond(self, turns: Sequence[Turn]) -> list[Answer]:
        """All calls of all turns side by side, with one deadline: as many as hang, they are waited for once."""
        waiting = [[self._start(call) for call in self._calls(turn)] for turn in turns]
        end = time.monotonic() + self.timeout_seconds
        return [self._collect(calls, end) for calls in waiting]

    def _calls(self, turn: Turn) -> list[ToolCall]:
        found = find_calls(turn.text, self.notation, self.tools)
        late = [
            ToolCall(name=call.name, problem=f"only {MAX_CALLS} calls a turn are made") for call in found[MAX_CALLS:]
        ]
        return [*found[:MAX_CALLS], *late]

    def _start(self, call: ToolCall) -> "queue.SimpleQueue[tuple[str, bool]]":
        """A daemon thread: a tool that never returns costs a thread and nothing else."""
        box: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: box.put(make_call(call, self.tools)), name=f"tool-{call.name}", daemon=True
        ).start()
        return box

    def _collect(self, calls: "Sequence[queue.SimpleQueue[tuple[str, bool]]]", end: float) -> Answer:
        results: list[tuple[str, bool]] = []
        for box in calls:
            try:
                results.append(box.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                results.append((f"error: no answer within {self.timeout_seconds:g} s", False))
        return Answer(
            texts=tuple(text for text, _ in results),
            is_last=not results,
            num_calls=len(results),
            num_errors=sum(not is_result for _, is_result in results),
        )
