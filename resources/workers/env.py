"""The environment worker: holds the environments of the episodes that run, one each."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from resources.dispatch import Dispatch, dispatch
from resources.environments import Environment, Observation, find_environment

MAX_EPISODES = 100_000
"""Environments kept at most; an episode that was broken off leaves one behind until then."""

Step = tuple[int, int, str, bytes]
"""Row id, number of the turn (1 is the first), text of the turn, record of the prompt."""


class EnvWorker:
    """One rank of the env role; usable in-process."""

    role = "env"

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises EnvironmentPathError for a path that leads nowhere."""
        self.rank = int(os.environ.get("RANK", "0"))
        self._make = find_environment(path, dict(options or {}))
        self._open: dict[int, Environment] = {}

    @dispatch(Dispatch.PER_RANK, split=("steps",))
    def step(self, steps: Sequence[Step]) -> dict[int, Observation]:
        """Row id -> (text, score so far, whether it ended). A first turn begins a new episode.

        An environment that raises ends its episode with score None, which leaves the row unscorable.
        """
        return {row_id: self._step(row_id, number, text, record) for row_id, number, text, record in steps}

    def _step(self, row_id: int, number: int, text: str, record: bytes) -> Observation:
        try:
            if number == 1 or row_id not in self._open:
                self._begin(row_id, record)
            said, score, has_ended = self._open[row_id].step(text)
            answer = str(said), float(score), bool(has_ended)
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; its episode ends, told as text
            self._open.pop(row_id, None)
            return f"error: {type(error).__name__}: {error}", None, True
        if has_ended:
            self._open.pop(row_id, None)
        return answer

    def _begin(self, row_id: int, record: bytes) -> None:
        if len(self._open) >= MAX_EPISODES:
            self._open.pop(next(iter(self._open)))
        environment = self._make()
        environment.reset(json.loads(record))
        self._open[row_id] = environment
