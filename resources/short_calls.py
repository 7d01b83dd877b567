"""Calls without arguments: the actor has a method for each, and Ray carries nothing.

Ray spends a tenth to a sixth of an empty call on one argument, however small (docs/benchmarks.md). A process is one
incarnation, so that a handle of it needs no header to be told from a later one.
"""

from collections.abc import Iterable

from resources.call_plan import is_simple
from resources.dispatch import MethodInfo

SHORT_CALLS = 16
"""Of one process; every method of an actor makes its handles larger. What comes after them is called with a header."""


def short_name(number: int) -> str:
    """The actor's method of that number."""
    return f"short_{number}"


def short_keys(methods: Iterable[tuple[str, MethodInfo]]) -> list[str]:
    """ROLE.METHOD of those of a process's methods, in its order of roles, that have a method of the actor.

    Empty for a process with async methods, where Ray would run the others on the event loop.
    """
    given = list(methods)
    if any(method.is_async for _, method in given):
        return []
    simple = [f"{role}.{method.name}" for role, method in given if is_simple(method) and not method.marking.bulk]
    return simple[:SHORT_CALLS]
