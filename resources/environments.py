"""Environments: an episode has one, which reads what the policy writes and says what comes next and what it is worth.

An environment is any class with `reset(record)` and `step(text) -> (str, float, bool)`: it begins an episode from the
prompt's record, then gives for each turn an observation, the score so far, and whether the episode ended.
They live in the workers of the `env` role, on a pool of their own, and a rollout worker reaches them by handle.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from resources.agent_loop import Answer, Turn
from resources.import_paths import ImportPathError, import_callable
from resources.worker_group import WorkerGroup

Record = Mapping[str, Any]
"""prompt, answer, source, index and extra of the row's prompt."""
Observation = tuple[str, float | None, bool]
"""Text, score so far (None: unknown), whether the episode has ended."""


class EnvironmentPathError(ValueError):
    """An environment that cannot be made; the text names its path."""


class Environment(Protocol):
    """One episode's."""

    def reset(self, record: Record) -> None:
        """Begin. The prompt has been read already."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """The policy wrote `text`: (what it reads next, its score so far, whether the episode ended)."""
        ...


def find_environment(path: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """What makes an environment: `module:Class` with `options`, or `reasoning_gym:NAME`.

    Raises EnvironmentPathError for a path that leads nowhere, and for options that the class does not take.
    """
    module, _, name = path.partition(":")
    try:
        found = ReasoningGym if module == "reasoning_gym" else import_callable(path)
    except ImportPathError as error:
        raise EnvironmentPathError(f"environment {path!r}: {error}") from error
    first = (name,) if module == "reasoning_gym" else ()
    try:
        inspect.signature(found).bind(*first, **options)
    except (TypeError, ValueError) as error:
        raise EnvironmentPathError(
            f"environment {path!r} cannot be made with options {dict(options)}: {error}; see "
            "rollout.tools.environment_options"
        ) from error
    make = cast("Callable[..., Environment]", found)
    return lambda: make(*first, **options)


def import_ahead(path: str) -> None:
    """Pay the seconds of importing reasoning-gym where no step's limit counts them."""
    if path.partition(":")[0] == "reasoning_gym":
        importlib.import_module("reasoning_gym")


class ReasoningGym:
    """A question of reasoning-gym with several attempts; the score is the best one's."""

    def __init__(self, dataset: str, attempts: int = 1, again: str = "\nWrong, try again.\n") -> None:
        self._dataset, self._left, self._again = dataset, attempts, again
        self._entry: Mapping[str, Any] = {}
        self._best = 0.0

    def reset(self, record: Record) -> None:
        """The prompt is the question. Raises ValueError for a row of another source."""
        extra = record["extra"]
        if extra.get("dataset") != self._dataset:
            raise ValueError(f"the row is of data set {extra.get('dataset')!r}; this environment is {self._dataset!r}")
        self._entry = extra["entry"]

    def step(self, text: str) -> tuple[str, float, bool]:
        """Score an attempt, with the data set's own verifier."""
        import reasoning_gym

        given = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        verify: Any = reasoning_gym.get_score_answer_fn(self._dataset)
        self._best = max(self._best, float(verify(given, self._entry)))
        self._left -= 1
        return self._again, self._best, self._best >= 1.0 or self._left <= 0


class EnvironmentResponder:
    """The rollout worker's side: turns go to the environment worker that holds the episode."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def wants(self, text: str) -> bool:
        """Always: the environment decides when an episode ends."""
        return True

    def respond(self, turns: Sequence[Turn]) -> list[Answer]:
        """One call of the group; an environment that failed ends its episode without a score.

        The workers bound each step. The call has the group's own deadline: its steps run one after the other, behind
        those of other rollout workers.
        """
        parts: list[list[tuple[int, int, str, bytes]]] = [[] for _ in range(self._group.world_size)]
        for turn in turns:
            owner = turn.group_id % self._group.world_size
            parts[owner].append((turn.row_id, turn.number, turn.text, turn.record))
        answered = self._group.submit("step", parts).result()
        found: dict[int, Observation] = {row: value for part in answered for row, value in part.items()}
        return [_answer(found[turn.row_id]) for turn in turns]


def _answer(observation: Observation) -> Answer:
    text, score, has_ended = observation
    return Answer(
        texts=(text,),
        is_last=has_ended,
        score=score,
        has_failed=score is None,
        num_calls=1,
        num_errors=int(score is None),
    )


def with_score(record: bytes, score: float | None) -> bytes:
    """The record with the environment's score in `extra`, where the grader `environment_score` reads it."""
    facts = json.loads(record)
    facts["extra"] = {**(facts.get("extra") or {}), "environment_score": score}
    return json.dumps(facts, ensure_ascii=False, default=str).encode()
