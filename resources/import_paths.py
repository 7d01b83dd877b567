"""A user's own modules (graders, losses, tools, data): their folders on the path, their functions by import path."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class ImportPathError(ValueError):
    """An import path that leads to nothing that can be called; the text says why."""


def add_import_paths(folders: Sequence[str]) -> dict[str, str]:
    """Put `folders` on this process's path, at once; returns the environment that does so in others.

    >>> add_import_paths([])
    {}
    """
    whole = [str(Path(folder).absolute()) for folder in folders]
    sys.path[:0] = [folder for folder in whole if folder not in sys.path]
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*whole, *([before] if before else [])])} if whole else {}


def import_callable(path: str) -> Callable[..., Any]:
    """The function or class at `module:name`. Raises ImportPathError."""
    module, name, found = _at(path)
    if not callable(found):
        raise ImportPathError(f"{module!r} has no function or class {name!r}")
    return found


def import_class(path: str) -> type:
    """The class at `module:name`. Raises ImportPathError."""
    module, name, found = _at(path)
    if not isinstance(found, type):
        raise ImportPathError(f"{module!r} has no class {name!r}")
    return found


def _at(path: str) -> tuple[str, str, Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ImportPathError(f"{path!r} is no import path; write it as package.module:name")
    try:
        return module, name, vars(importlib.import_module(module)).get(name)
    except Exception as error:  # a user's module may raise anything while it is imported
        told = f"{type(error).__name__}: {error}"
        raise ImportPathError(f"{module!r} does not import: {told}; see code.import_paths") from error
