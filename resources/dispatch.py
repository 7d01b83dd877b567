"""How a worker-group method splits its arguments over the ranks and joins what they answer.

The decorator only marks the method; in-process it stays a plain callable.
"""

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from resources.ranks import Mesh

Reduction = Literal["sum", "mean", "max", "min"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "callsheet_dispatch"


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
    reduce: Mapping[str, Reduction] = field(default_factory=dict[str, Reduction])
    scatter: Dispatch = Dispatch.BROADCAST
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


def dispatch(
    mode: Dispatch | CustomDispatch,
    *,
    blocking: bool = True,
    bulk: bool = False,
    split: Sequence[str] | None = None,
    reduce: Mapping[str, Reduction] | None = None,
    scatter: Dispatch = Dispatch.BROADCAST,
    read_only: bool = False,
) -> Callable[[Method], Method]:
    """Mark a worker method.

    Args:
        mode: one of `Dispatch`, or a `CustomDispatch`.
        blocking: False makes the call return a `PendingCall` at once.
        bulk: the method returns (status, data); the caller gets (status, ObjectRef) per answering rank, never the data.
        split: names of the arguments that are cut (SPLIT_ROWS, MESH) or listed per rank (PER_RANK); all others are
            sent whole. Left out: every argument that has rows is cut; with PER_RANK every argument is a list.
        reduce: METRICS only, metric name or pattern (`time/*`) -> sum, mean, max or min. Nothing is guessed.
        scatter: METRICS only, how its arguments are split.
        read_only: arrays arrive as views of shared memory instead of copies; the method must not write into them.

    Raises:
        ValueError: for options that do not go together.
    """
    if (mode is Dispatch.METRICS) != bool(reduce):
        raise ValueError(
            f"dispatch mode is {mode} and reduce is {reduce}; metrics need reduce={{'name': 'sum' | 'mean' | 'max' | "
            "'min'}, other modes take none"
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
            f"{worker_class.__name__}.{name} is marked split={marking.split}, but has no argument "
            f"{unknown[0]!r}; it has {sorted(known)}"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return MethodInfo(
        name=name,
        marking=marking,
        signature=inspect.Signature(plain),
        is_async=inspect.iscoroutinefunction(function),
        needs_arguments=any(p.default is inspect.Parameter.empty and p.kind not in variadic for p in plain),
    )
