"""How a worker-group method splits its arguments over the ranks and joins what they answer.

The decorator only marks the method; in-process it stays a plain callable. Planning is pure: it is given the world,
the mesh and a function that shares a value (a put into the object store), and never talks to Ray itself.
"""

import enum
import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from resources.ranks import Mesh
from resources.splitting import has_rows, join_rows, row_count, split_rows, split_sizes

Reduction = Literal["sum", "mean", "max", "min"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "callsheet_dispatch"
_SMALL_BYTES = 4096
_SMALL_ITEMS = 16


class Dispatch(enum.StrEnum):
    """Ready-made ways to split and join."""

    BROADCAST = "broadcast"
    """Every rank gets the same arguments; a list of answers in rank order."""
    PER_RANK = "per_rank"
    """Each argument is a list with one entry per rank; a list of answers in rank order."""
    SPLIT_ROWS = "split_rows"
    """Rows are split over all ranks (uneven is legal) and joined in rank order."""
    MESH = "mesh"
    """Rows are split by data-parallel rank; its peers share one copy, and the collecting rank answers."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called; its answer alone."""
    METRICS = "metrics"
    """Every rank answers with a mapping of numbers, reduced as the author declared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """What planning needs to know of a group."""

    role: str
    world_size: int
    mesh: Mesh = field(default_factory=Mesh)


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomDispatch:
    """A way of one's own: `split` gives one (args, kwargs) per rank, `join` gets the answers in rank order."""

    split: Callable[[Topology, tuple[Any, ...], dict[str, Any]], Sequence[Arguments]]
    join: Callable[[Topology, list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marking:
    """What `dispatch` wrote on a method."""

    mode: Dispatch | CustomDispatch
    blocking: bool = True
    bulk: bool = False
    split: tuple[str, ...] | None = None
    reduce: Mapping[str, Reduction] = field(default_factory=dict)
    scatter: Dispatch = Dispatch.BROADCAST
    join: bool = True
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodInfo:
    """A marked method as callers in other processes know it: no annotations, no defaults, no class."""

    name: str
    marking: Marking
    signature: inspect.Signature
    is_async: bool
    needs_arguments: bool

    def parameter_names(self, count: int) -> list[str]:
        """Names of the first `count` positional arguments; `*rest` becomes rest[0], rest[1], ..."""
        names: list[str] = []
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
            elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                names.append(parameter.name)
        return names[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """Arguments per called rank, in rank order, and which of those ranks answer with data."""

    arguments: list[Arguments]
    answering: list[bool]


def dispatch(
    mode: Dispatch | CustomDispatch,
    *,
    blocking: bool = True,
    bulk: bool = False,
    split: Sequence[str] | None = None,
    reduce: Mapping[str, Reduction] | None = None,
    scatter: Dispatch = Dispatch.BROADCAST,
    join: bool = True,
    read_only: bool = False,
) -> Callable[[Method], Method]:
    """Mark a worker method.

    Args:
        mode: one of `Dispatch`, or a `CustomDispatch`.
        blocking: False makes the call return a `PendingCall` at once.
        bulk: the method returns (status, data); the caller gets (status, ObjectRef) per answering rank, never the data.
        split: names of the arguments that are cut (SPLIT_ROWS, MESH) or listed per rank (PER_RANK); all others are
            sent whole. Left out: every argument that has rows is cut; with PER_RANK every argument is a list.
        reduce: METRICS only, metric name or pattern (`time/*`) -> sum, mean, max or min. Nothing is guessed from a name.
        scatter: METRICS only, how its arguments are split.
        join: SPLIT_ROWS and MESH; False keeps the list of parts.
        read_only: arrays arrive as views of shared memory instead of copies; the method must not write into them.

    Raises:
        ValueError: for options that do not go together.
    """
    if (mode is Dispatch.METRICS) != bool(reduce):
        raise ValueError(
            f"dispatch mode is {mode} and reduce is {reduce}; metrics need reduce={{'name': 'sum' | 'mean' | 'max' | 'min'}}, "
            "other modes take none"
        )
    wrong = sorted({str(how) for how in (reduce or {}).values()} - {"sum", "mean", "max", "min"})
    if wrong:
        raise ValueError(f"reduce names {wrong[0]!r}; a metric is reduced by sum, mean, max or min")
    if bulk and mode is Dispatch.METRICS:
        raise ValueError("bulk is True for a metrics method; metrics are small and travel with the status")
    marking = Marking(
        mode=mode,
        blocking=blocking,
        bulk=bulk,
        split=None if split is None else tuple(split),
        reduce=dict(reduce or {}),
        scatter=scatter,
        join=join,
        read_only=read_only,
    )

    def mark(method: Method) -> Method:
        setattr(method, _MARK, marking)
        return method

    return mark


def marked_methods(worker_class: type) -> dict[str, MethodInfo]:
    """The marked methods of a worker class, inherited ones included; an override keeps the mark of its parent."""
    markings: dict[str, Marking] = {}
    for parent in reversed(worker_class.__mro__):
        for name, member in vars(parent).items():
            if inspect.isfunction(member) and _MARK in vars(member):
                markings[name] = vars(member)[_MARK]
    return {name: _describe(worker_class, name, marking) for name, marking in markings.items()}


def _describe(worker_class: type, name: str, marking: Marking) -> MethodInfo:
    function = inspect.getattr_static(worker_class, name)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.default if parameter.default is inspect.Parameter.empty else None,
        )
        for parameter in parameters
    ]
    known = {parameter.name for parameter in plain}
    unknown = sorted(set(marking.split or ()) - known)
    if unknown:
        raise ValueError(
            f"{worker_class.__name__}.{name} is marked split={marking.split}, but has no argument {unknown[0]!r}; it has {sorted(known)}"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return MethodInfo(
        name=name,
        marking=marking,
        signature=inspect.Signature(plain),
        is_async=inspect.iscoroutinefunction(function),
        needs_arguments=any(p.default is inspect.Parameter.empty and p.kind not in variadic for p in plain),
    )


def plan_call(
    method: MethodInfo,
    topology: Topology,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    share: Callable[[Any], Any],
) -> CallPlan:
    """Split the arguments of a call over the ranks.

    `share` turns a value that several ranks get into a reference all of them can be sent; it is called once per value.
    Raises ValueError naming role, method and argument for arguments that do not fit.
    """
    where = f"{topology.role}.{method.name}"
    if args or kwargs or method.needs_arguments:
        try:
            method.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{where}: {error}; it takes {method.signature}") from error
    mode = method.marking.mode
    world = topology.world_size
    everyone = [True] * world
    if isinstance(mode, CustomDispatch):
        split = list(mode.split(topology, args, kwargs))
        if len(split) != world:
            raise ValueError(
                f"{where}: its own split gave {len(split)} argument sets for {world} ranks; give one per rank"
            )
        return CallPlan(arguments=[(tuple(a), dict(k)) for a, k in split], answering=everyone)
    scatter = method.marking.scatter if mode is Dispatch.METRICS else mode
    if scatter is Dispatch.RANK_ZERO:
        return CallPlan(arguments=[(args, kwargs)], answering=[True])
    if not args and not kwargs:
        arguments = [((), {})] * world
    else:
        cut = _CUTTERS[scatter](method, topology, share)
        names = method.parameter_names(len(args))
        columns = [cut(name, value) for name, value in zip(names, args, strict=True)]
        keyed = {name: cut(name, value) for name, value in kwargs.items()}
        _check_rows_agree(where, cut)
        arguments = [
            (tuple(column[rank] for column in columns), {name: column[rank] for name, column in keyed.items()})
            for rank in range(world)
        ]
    if scatter is not Dispatch.MESH:
        return CallPlan(arguments=arguments, answering=everyone)
    return CallPlan(arguments=arguments, answering=[topology.mesh.is_collecting(rank, world) for rank in range(world)])


class _Cutter:
    """Gives the parts of one argument, a list with an entry per rank."""

    def __init__(self, method: MethodInfo, topology: Topology, share: Callable[[Any], Any]) -> None:
        self.where = f"{topology.role}.{method.name}"
        self.split = method.marking.split
        self.world = topology.world_size
        self.mesh = topology.mesh
        self.share = share
        self.rows: dict[str, int] = {}

    def is_cut(self, name: str, value: Any) -> bool:
        return has_rows(value) if self.split is None else name.split("[")[0] in self.split

    def __call__(self, name: str, value: Any) -> list[Any]:
        return self.whole(value, self.world)

    def whole(self, value: Any, copies: int) -> list[Any]:
        return [self.share(value) if copies > 1 and not _is_small(value) else value] * copies


class _PerRank(_Cutter):
    def is_cut(self, name: str, value: Any) -> bool:
        return self.split is None or name.split("[")[0] in self.split

    def __call__(self, name: str, value: Any) -> list[Any]:
        if not self.is_cut(name, value):
            return self.whole(value, self.world)
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"{self.where}: argument {name} is a {type(value).__name__}; per-rank arguments are lists of {self.world}, one entry per rank"
            )
        if len(value) != self.world:
            raise ValueError(
                f"{self.where}: argument {name} has {len(value)} entries and the group has {self.world} ranks; give one entry per rank"
            )
        return list(value)


class _SplitRows(_Cutter):
    def sizes(self, name: str, value: Any, parts: int) -> list[int]:
        try:
            self.rows[name] = row_count(value)
        except ValueError as error:
            raise ValueError(f"{self.where}: argument {name} cannot be split by rows: {error}") from error
        return split_sizes(self.rows[name], parts)

    def __call__(self, name: str, value: Any) -> list[Any]:
        if not self.is_cut(name, value):
            return self.whole(value, self.world)
        return split_rows(value, self.sizes(name, value, self.world))


class _SplitMesh(_SplitRows):
    def __call__(self, name: str, value: Any) -> list[Any]:
        if not self.is_cut(name, value):
            return self.whole(value, self.world)
        dp_size = self.mesh.dp_size(self.world)
        chunks = split_rows(value, self.sizes(name, value, dp_size))
        if dp_size < self.world:
            chunks = [chunk if _is_small(chunk) else self.share(chunk) for chunk in chunks]
        return [chunks[self.mesh.coordinates(rank, self.world).dp] for rank in range(self.world)]


_CUTTERS: dict[Dispatch, type[_Cutter]] = {
    Dispatch.BROADCAST: _Cutter,
    Dispatch.PER_RANK: _PerRank,
    Dispatch.SPLIT_ROWS: _SplitRows,
    Dispatch.MESH: _SplitMesh,
}


def _check_rows_agree(where: str, cut: _Cutter) -> None:
    if len(set(cut.rows.values())) > 1:
        raise ValueError(
            f"{where}: arguments that are split have different numbers of rows: {cut.rows}; name those to be split in "
            "dispatch(split=...) or give all the same rows"
        )


def _is_small(value: Any) -> bool:
    """Whether a value is cheaper to send again than to share."""
    if value is None or isinstance(value, bool | int | float | enum.Enum):
        return True
    if isinstance(value, str | bytes):
        return len(value) <= _SMALL_BYTES
    if isinstance(value, Mapping):
        return len(value) <= _SMALL_ITEMS and all(_is_small(item) for item in value.values())
    return isinstance(value, list | tuple) and len(value) <= _SMALL_ITEMS and all(_is_small(item) for item in value)


def join_answers(method: MethodInfo, topology: Topology, answers: list[Any]) -> Any:
    """What the caller gets, from the answers of the answering ranks in rank order."""
    mode = method.marking.mode
    if isinstance(mode, CustomDispatch):
        return mode.join(topology, answers)
    if mode is Dispatch.RANK_ZERO:
        return answers[0]
    if mode is Dispatch.METRICS:
        return _reduce_metrics(f"{topology.role}.{method.name}", method.marking.reduce, answers)
    joins = mode in (Dispatch.SPLIT_ROWS, Dispatch.MESH) and method.marking.join and not method.marking.bulk
    if joins and all(has_rows(answer) for answer in answers):
        return join_rows(answers)
    return answers


def _reduce_metrics(where: str, reduce: Mapping[str, Reduction], answers: list[Any]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for rank, answer in enumerate(answers):
        if not isinstance(answer, Mapping):
            raise ValueError(
                f"{where}: rank {rank} answered a {type(answer).__name__}; a metrics method returns a mapping of numbers"
            )
        for name, value in answer.items():
            columns.setdefault(name, []).append(float(value))
    return {name: _reduce(_declared(where, reduce, name), values) for name, values in columns.items()}


def _declared(where: str, reduce: Mapping[str, Reduction], name: str) -> Reduction:
    if name in reduce:
        return reduce[name]
    for pattern, how in reduce.items():
        if fnmatch.fnmatchcase(name, pattern):
            return how
    raise ValueError(
        f"{where}: metric {name!r} has no declared reduction; add it to dispatch(reduce=...), which declares {sorted(reduce)}"
    )


def _reduce(how: Reduction, values: list[float]) -> float:
    if how == "sum":
        return sum(values)
    if how == "mean":
        return sum(values) / len(values)
    return max(values) if how == "max" else min(values)
