"""What a grader is to a reward worker: plain values that are built elsewhere and travel with the worker's arguments.

Nothing here imports torch or Ray. A `Sample` is a response with its prompt; an `Outcome` is what one call gave.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["rule", "python", "model", "judge", "http", "sandbox"]
Cause = Literal["timeout", "error", "nonsense"]
CAUSES: tuple[Cause, ...] = ("timeout", "error", "nonsense")

FINISH_REASONS = ("stop", "length", "abort")
"""By their number in the batch's column, which `resources.engines.base.FinishReason` gives them."""
TRUNCATED = FINISH_REASONS.index("length")
"""The finish reason of a response cut at the length limit."""
ABORTED = FINISH_REASONS.index("abort")
"""The finish reason of a response that was ended from outside."""


class GraderFailedError(Exception):
    """One grading call that gave no score: why, in one word and in one sentence."""

    def __init__(self, cause: Cause, text: str, seconds: float = 0.0) -> None:
        super().__init__(text)
        self.cause: Cause = cause
        self.seconds = seconds


class Secret:
    """A key that can be sent and used, but not printed.

    >>> Secret("sk-123")
    Secret(***)
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The key itself; for a request's header, never for a message."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> tuple[type["Secret"], tuple[str]]:
        return (Secret, (self._value,))


@dataclass(frozen=True, kw_only=True)
class Grader:
    """One source of reward, ready to be used on any node."""

    name: str
    kind: Kind
    weight: float = 1.0
    sources: tuple[str, ...] = ()
    """Data sources it scores; all when empty."""
    is_group_wise: bool = False
    timeout_seconds: float = 30.0
    """Of one call; waiting for a free process or for a rate limit is not counted."""
    on_failure: Literal["exclude", "retry", "stop"] = "exclude"
    retries: int = 2
    function: str | None = None
    """rule and python: `module:name` of a function that takes keywords; grader processes import it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of that function; JSON."""
    modules: tuple[str, ...] = ()
    """Imported before the first call, so that the import is not counted as grading."""
    backend: Any = None
    """judge, http and sandbox: the values of that kind (`JudgeSettings`, `HttpSettings`, `CodeSettings`)."""

    def scores_source(self, source: str) -> bool:
        """Whether rows of this data source are graded here."""
        return not self.sources or source in self.sources

    @property
    def attempts(self) -> int:
        """Calls at most until a row counts as unscorable."""
        return 1 + (self.retries if self.on_failure == "retry" else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """A response as the rollout hands it over, before it is decoded."""

    row_id: int
    group_id: int
    record: bytes
    """UTF-8 JSON of the prompt's `prompt`, `answer`, `source`, `index` and `extra`."""
    response_ids: tuple[int, ...]
    """Tokens the policy sampled (response_mask true): tool output is not among them."""
    finish_reason: int = 0
    """0 stop, 1 length, 2 abort."""
    response_length: int = 0
    """All tokens after the prompt, tool output included."""
    group_size: int | None = None
    """Responses to this prompt, where known: a group-wise grader can then start before the batch is complete."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody answered it: what was merely cut by an abort holds tokens."""
        return self.finish_reason == ABORTED and not self.response_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What graders see of a response."""

    row_id: int
    group_id: int
    prompt: str
    response: str
    answer: Any
    source: str
    index: int
    extra: Mapping[str, Any]
    finish_reason: int
    response_length: int
    is_lost: bool = False
    """See `FinishedRow`: there is nothing to grade, which is no empty answer."""

    @property
    def is_truncated(self) -> bool:
        """Cut at the length limit; a finished response never is, however long its context."""
        return self.finish_reason == TRUNCATED


def read_sample(row: FinishedRow, response: str) -> Sample:
    """Join a row's record with its decoded response. Raises ValueError for a record that is no JSON object."""
    try:
        record = json.loads(row.record)
    except ValueError as error:
        raise ValueError(f"record of row {row.row_id} is not JSON: {error}") from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError(f"record of row {row.row_id} is {str(record)[:80]!r}; it is an object with a prompt")
    return Sample(
        row_id=row.row_id,
        group_id=row.group_id,
        prompt=record["prompt"] if isinstance(record["prompt"], str) else json.dumps(record["prompt"]),
        response=response,
        answer=record.get("answer"),
        source=str(record.get("source", "")),
        index=int(record.get("index") or 0),
        extra=record.get("extra") or {},
        finish_reason=row.finish_reason,
        response_length=row.response_length or len(row.response_ids),
        is_lost=row.is_lost,
    )


def owner_of(group_id: int, world_size: int) -> int:
    """Rank of the reward worker that scores a group: siblings meet on one worker, whoever finished them."""
    return group_id % world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Scores of one grading call, in the order of its samples, and its own time."""

    scores: tuple[float, ...]
    seconds: float


def check_scores(
    value: Any, count: int, grader: str, seconds: float = 0.0, *, is_group: bool = False
) -> tuple[float, ...]:
    """The numbers a grader gave for `count` responses. Raises GraderFailedError('nonsense') for anything else.

    A single response takes a number (or a list of one); a group takes exactly as many as it has responses, as a list
    or as a column of lists of one. Nothing is broadcast.

    >>> check_scores(True, 1, "math"), check_scores([[1.0], [0.5]], 2, "style", is_group=True)
    ((1.0,), (1.0, 0.5))
    """
    if not isinstance(value, list | tuple):
        if is_group:
            _refuse(
                f"grader {grader!r} returned {_shown(value)}; it has to return a list of {count} scores",
                seconds,
            )
        value = [value]
    flat: list[Any] = [item[0] if isinstance(item, list | tuple) and len(item) == 1 else item for item in value]
    if len(flat) != count:
        _refuse(
            f"grader {grader!r} returned {len(flat)} scores for {count} responses; it has to return {count}", seconds
        )
    for score in flat:
        if not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:  # nan is not; nor is 10 ** 400
            _refuse(f"grader {grader!r} returned {_shown(score)}; a score is a finite number", seconds)
    return tuple(float(score) for score in flat)


def _refuse(text: str, seconds: float) -> None:
    raise GraderFailedError("nonsense", text, seconds)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def describe(samples: Sequence[Sample]) -> str:
    """Which rows a call was about, for messages."""
    return f"row {samples[0].row_id}" if len(samples) == 1 else f"group {samples[0].group_id} of {len(samples)} rows"
