"""The environment worker: holds the environments of the episodes that run, one each."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from resources.dispatch import Dispatch, dispatch
from resources.environments import Environment, Observation, find_environment, import_ahead
from resources.step_thread import StepThread

MAX_EPISODES = 100_000
"""Environments kept at most; an episode that was broken off leaves one behind until then."""
MAX_MISSES = 8
"""After so many steps in a row that did not come back, the rest of the call is not tried: where what all environments
ask is down, every row of it would be waited for."""

Step = tuple[int, int, str, bytes]
"""Row id, number of the turn (1 is the first), text of the turn, record of the prompt."""


class EnvWorker:
    """One rank of the env role; usable in-process."""

    role = "env"

    def __init__(self, path: str, options: Mapping[str, Any] | None = None, timeout_seconds: float = 10.0) -> None:
        """`timeout_seconds`: of one step. Raises EnvironmentPathError for a path that leads nowhere."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.timeout_seconds = timeout_seconds
        self._make = find_environment(path, dict(options or {}))
        import_ahead(path)
        self._open: dict[int, Environment] = {}
        self._thread: StepThread | None = None
        self._misses = 0

    @dispatch(Dispatch.PER_RANK, split=("steps",))
    def step(self, steps: Sequence[Step]) -> dict[int, Observation]:
        """Row id -> (text, score so far, whether it ended). A first turn begins a new episode.

        An environment that raises, or whose step does not return in time, ends its episode with score None, which
        leaves the row unscorable. All steps run in one thread, until one of them does not return.
        """
        self._misses = 0
        return {row_id: self._step(row_id, number, text, record) for row_id, number, text, record in steps}

    def _step(self, row_id: int, number: int, text: str, record: bytes) -> Observation:
        known = self._open.pop(row_id, None)
        environment, observation = self._answer(None if number == 1 else known, text, record)
        if environment is not None and not observation[2]:
            self._keep(row_id, environment)
        return observation

    def _answer(self, known: Environment | None, text: str, record: bytes) -> tuple[Environment | None, Observation]:
        """The environment and what it said; no environment where it failed."""

        def work() -> tuple[Environment | None, Observation]:
            try:
                environment = self._begin(record) if known is None else known
                said, score, has_ended = environment.step(text)
                return environment, (str(said), float(score), bool(has_ended))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's environment may raise anything; its episode ends, told as text
                return None, _failed(f"{type(error).__name__}: {error}")

        if self._misses >= MAX_MISSES:
            return None, _failed(f"not tried: {MAX_MISSES} steps before it gave nothing in {self.timeout_seconds:g} s")
        self._thread = self._thread or StepThread("environment")
        try:
            found = self._thread.call(work, self.timeout_seconds)
        except TimeoutError as error:
            self._thread, self._misses = None, self._misses + 1  # it may still be at work on this one
            return None, _failed(str(error))
        self._misses = 0
        return found

    def _begin(self, record: bytes) -> Environment:
        environment = self._make()
        environment.reset(json.loads(record))
        return environment

    def _keep(self, row_id: int, environment: Environment) -> None:
        if len(self._open) >= MAX_EPISODES:
            self._open.pop(next(iter(self._open)))
        self._open[row_id] = environment


def _failed(why: str) -> Observation:
    return f"error: {why}", None, True
