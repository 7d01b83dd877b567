"""Carrying out a dispatch: arguments per rank before a call, one value from the answers after it.

Pure: it is given the topology and a function that shares a value (a put into the object store), and never talks to Ray.
"""

import enum
import fnmatch
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resources.dispatch import Arguments, CustomDispatch, Dispatch, MethodInfo, Reduction, Topology
from resources.splitting import has_rows, join_rows, row_count, split_rows, split_sizes

_SMALL_BYTES = 4096
_SMALL_ITEMS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """Arguments per called rank, in rank order, and which of those ranks answer with data."""

    arguments: list[Arguments]
    answering: list[bool]

    def has(self, kind: type) -> bool:
        """Whether any argument is of that class."""
        return any(
            isinstance(value, kind) for args, named in self.arguments for value in itertools.chain(args, named.values())
        )


def is_simple(method: MethodInfo) -> bool:
    """Whether a call without arguments goes to every rank as it is, and every rank answers."""
    marking = method.marking
    goes_to_all = marking.mode is Dispatch.BROADCAST or (
        marking.mode is Dispatch.METRICS and marking.scatter is not Dispatch.RANK_ZERO
    )
    return goes_to_all and not method.needs_arguments


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
                f"{self.where}: argument {name} is a {type(value).__name__}; per-rank arguments are lists "
                f"of {self.world}, one entry per rank"
            )
        if len(value) != self.world:
            raise ValueError(
                f"{self.where}: argument {name} has {len(value)} entries and the group has {self.world} ranks; "
                "give one entry per rank"
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
    joins = mode in (Dispatch.SPLIT_ROWS, Dispatch.MESH) and not method.marking.bulk
    if joins and all(has_rows(answer) for answer in answers):
        return join_rows(answers)
    return answers


def _reduce_metrics(where: str, reduce: Mapping[str, Reduction], answers: list[Any]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for rank, answer in enumerate(answers):
        if not isinstance(answer, Mapping):
            raise ValueError(
                f"{where}: rank {rank} answered a {type(answer).__name__}; a metrics method returns a dict of numbers"
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
        f"{where}: metric {name!r} has no declared reduction; add it to dispatch(reduce=...), "
        f"which declares {sorted(reduce)}"
    )


def _reduce(how: Reduction, values: list[float]) -> float:
    if how == "sum":
        return sum(values)
    if how == "mean":
        return sum(values) / len(values)
    return max(values) if how == "max" else min(values)
