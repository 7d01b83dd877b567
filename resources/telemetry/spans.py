"""Spans: what every task and every rank of a run measured, one JSON line a record in `RUN_DIR/spans.jsonl`.

Times are seconds of the controller's monotonic clock, wherever they were taken: a worker adds its offset before it
answers, the controller takes off that of a task host. Keys that are not fields are *facts* of the role (names and units
in `facts.py`) and stand beside the fields in the JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

SCHEMA_VERSION = 1
CONTROLLER = "controller"

Facts = Mapping[str, Any]
"""JSON values by name; see `facts.py`."""


def _known(cls: type, record: Mapping[str, Any], names: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record's keys that are fields of `cls`, and the rest. Raises ValueError for what is no JSON object."""
    if type(record) is not dict:  # cheaper than asking for a Mapping, half a million times for a long run
        raise ValueError(f"a {cls.__name__} is written as a JSON object, not as {record!r}")
    known: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for key, value in record.items():
        (known if key in names else facts)[key] = value
    return known, facts


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpan:
    """One rank's share of a task: on that rank's own node, by the controller's clock.

    >>> RankSpan(rank=0, start=1.0, end=3.0, communication_seconds=0.5).work_seconds
    1.5
    """

    rank: int
    start: float
    end: float
    node: str = ""
    duty: str = ""
    """Whose rank it is, where that is not the task's role: `reward` for grading that a rollout asks for,
    `reward_model.NAME`, `teacher.NAME`."""
    queue_seconds: float = 0.0
    """The call waited for the worker, which was busy with another call; lies before `start`."""
    transfer_seconds: float = 0.0
    """Fetching the rows, first thing after `start`."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    communication_seconds: float = 0.0
    """In collectives, waiting for slower peers included: the slow rank has the *smallest*."""
    cpu_seconds: float = 0.0
    facts: Facts = field(default_factory=dict)

    @property
    def execute_seconds(self) -> float:
        return self.end - self.start

    @property
    def work_seconds(self) -> float:
        """Execution without collectives and without fetching rows: what this rank itself needed."""
        return max(0.0, self.end - self.start - self.communication_seconds - self.transfer_seconds)

    def to_json(self) -> dict[str, Any]:
        return _written(self, _RANK_FIELDS)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RankSpan":
        known, facts = _known(cls, record, _RANK_FIELDS)
        return cls(**known, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Seconds a task waited before it could work; the time line decides what is charged, these say why."""

    upstream: float = 0.0
    weights: float = 0.0
    """For the weights it samples with to be in force (rollout), from the moment its engine was opened for them."""
    queue: float = 0.0
    """For a worker of its pool that was busy with another task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Handing a task's arguments to its workers."""

    serialize_seconds: float = 0.0
    put_seconds: float = 0.0
    unpack_seconds: float = 0.0
    """In the task host, when all inputs were there."""
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of the controller."""
        return self.serialize_seconds + self.put_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect:
    """Bringing the workers' answers back."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpan:
    """One task of one iteration: when it was submitted, ran (in the task host on `node`) and ended, and its ranks.

    All by the controller's clock. Files with a `ClockRecord` are older: there `started` and `ended` are of `node`'s.
    """

    RECORD: ClassVar[str] = "task"

    iteration: int
    task: str
    started: float
    ended: float
    attempt: int = 1
    role: str = ""
    pool: str = ""
    node: str = ""
    submitted: float | None = None
    upstream: tuple[str, ...] = ()
    """Tasks of the same iteration that had to end first."""
    waits: Waits = Waits()
    dispatch: Dispatch = Dispatch()
    collect: Collect = Collect()
    ranks: tuple[RankSpan, ...] = ()
    facts: Facts = field(default_factory=dict)

    @property
    def graders(self) -> list[Mapping[str, Any]]:
        """Entries of the `graders` fact that made calls: the task's own, or else its ranks'."""
        sources = [self.facts] if "graders" in self.facts else [rank.facts for rank in self.ranks]
        return [grader for facts in sources for grader in facts.get("graders", ()) if grader.get("calls")]

    def to_json(self) -> dict[str, Any]:
        record = _written(self, _TASK_FIELDS)
        record["upstream"] = list(self.upstream)
        record["ranks"] = [rank.to_json() for rank in self.ranks]
        for name, part, empty in (("waits", self.waits, Waits()), ("dispatch", self.dispatch, Dispatch())):
            record[name] = {} if part == empty else {f.name: getattr(part, f.name) for f in fields(part)}
        record["collect"] = {"seconds": self.collect.seconds, "bytes": self.collect.bytes}
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "TaskSpan":
        known, facts = _known(cls, record, _TASK_FIELDS)
        facts.pop("record", None)
        facts.pop("schema", None)
        for name, part in (("waits", Waits), ("dispatch", Dispatch), ("collect", Collect)):
            if name in known:
                names = {f.name for f in fields(part)}
                known[name] = part(**{key: value for key, value in known[name].items() if key in names})
        known["upstream"] = tuple(known.get("upstream", ()))
        known["ranks"] = tuple(RankSpan.from_json(rank) for rank in known.get("ranks", ()))
        return cls(**known, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationSpan:
    """The iteration as the controller saw it, written when it ended; a missing one means it did not end."""

    RECORD: ClassVar[str] = "iteration"

    iteration: int
    started: float
    ended: float
    attempt: int = 1
    facts: Facts = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return _written(self, _ITERATION_FIELDS)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "IterationSpan":
        known, facts = _known(cls, record, _ITERATION_FIELDS)
        facts.pop("record", None)
        return cls(**known, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockRecord:
    """Offsets of the nodes' clocks against the controller's: `controller time = node time - offset`.

    Written by older versions, whose tasks stand in the file by the clock of their node; see `clocks.correct_span`.
    """

    RECORD: ClassVar[str] = "clock"

    offsets: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    """Half the shortest round trip: the true offset lies within."""

    def to_json(self) -> dict[str, Any]:
        return {"offsets": dict(self.offsets), "errors": dict(self.errors)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "ClockRecord":
        return cls(offsets=dict(record.get("offsets", {})), errors=dict(record.get("errors", {})))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRecord:
    """Size of one pool as the run had it."""

    ranks: int
    accelerator: str = "none"
    nodes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """First line of a run, again after each resume: what a what-if needs to know of hardware and batch."""

    RECORD: ClassVar[str] = "run"

    schema: int = SCHEMA_VERSION
    run: str = ""
    cores_per_node: float = 0.0
    accelerator_bytes: int = 0
    pools: Mapping[str, PoolRecord] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role -> pool."""
    colocate: Mapping[str, str] = field(default_factory=dict)
    """Role -> fused, shared or split."""
    prompts_per_iteration: int = 0
    group_size: int = 0
    max_running_sequences: int = 0
    async_depth: int = 0
    rollout_engines: int = 0
    rollout_tensor_parallel: int = 0
    """Ranks of one engine; both are 0 in runs of an older version."""
    refused: tuple[str, ...] | None = None
    """Changes that the config would not take (`configs/changes.py`); None in runs of an older version."""
    facts: Facts = field(default_factory=dict)

    @property
    def refused_changes(self) -> tuple[str, ...]:
        """`refused`; of an older run, what its layout tells."""
        if self.refused is not None:
            return self.refused
        styles = [self.colocate.get(role) for role in ("actor", "rollout")]
        is_hybrid = any(role.startswith("actor_rollout") for role in self.colocate)
        if is_hybrid or (styles == ["fused", "fused"] and self.roles.get("actor") == self.roles.get("rollout")):
            return ("ahead", "process_group", "fuse", "fewer_engines")
        return ("ahead", "ahead_apart", "fuse") if self.async_depth else ()

    def to_json(self) -> dict[str, Any]:
        record = _written(self, _RUN_FIELDS)
        record["pools"] = {
            name: {"ranks": pool.ranks, "accelerator": pool.accelerator, "nodes": pool.nodes}
            for name, pool in self.pools.items()
        }
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RunRecord":
        known, facts = _known(cls, record, _RUN_FIELDS)
        facts.pop("record", None)
        if known.get("refused") is not None:
            known["refused"] = tuple(known["refused"])
        known["pools"] = {name: PoolRecord(**pool) for name, pool in known.get("pools", {}).items()}
        return cls(**known, facts=facts)


Record = TaskSpan | IterationSpan | ClockRecord | RunRecord

_RANK_FIELDS = frozenset(f.name for f in fields(RankSpan)) - {"facts"}
_TASK_FIELDS = frozenset(f.name for f in fields(TaskSpan)) - {"facts"}
_ITERATION_FIELDS = frozenset(f.name for f in fields(IterationSpan)) - {"facts"}
_RUN_FIELDS = frozenset(f.name for f in fields(RunRecord)) - {"facts"}
_NESTED = frozenset({"waits", "dispatch", "collect", "ranks", "upstream", "pools"})


def _written(span: Any, names: frozenset[str]) -> dict[str, Any]:
    """Fields and facts side by side; zero durations and empty strings are left out, they are the defaults."""
    record = {
        name: value
        for name in sorted(names - _NESTED)
        if (value := getattr(span, name)) not in (0.0, "", None)
        or name in ("rank", "start", "end", "iteration", "started", "ended")
    }
    clash = names & span.facts.keys()
    if clash:
        raise ValueError(
            f"facts {sorted(clash)} of a {type(span).__name__} have names of its fields; set the field instead"
        )
    return {**record, **span.facts}
