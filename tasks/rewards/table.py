"""The graders by name, and a user's own by import path."""

import functools
import importlib
from collections.abc import Callable, Mapping

from tasks.rewards.environment_score import environment_score
from tasks.rewards.exact_answer import exact_answer, positions_right
from tasks.rewards.length import overlong_penalty
from tasks.rewards.math_answer import math_answer
from tasks.rewards.numeric_answer import numeric_answer
from tasks.rewards.reasoning_gym_answer import reasoning_gym_answer
from tasks.rewards.response_format import response_format
from tasks.rewards.score import Grader

GRADERS: dict[str, Grader] = {
    "exact_answer": exact_answer,
    "positions_right": positions_right,
    "numeric_answer": numeric_answer,
    "math_answer": math_answer,
    "response_format": response_format,
    "overlong_penalty": overlong_penalty,
    "reasoning_gym_answer": reasoning_gym_answer,
    "environment_score": environment_score,
}


def find_grader(name: str, options: Mapping[str, object] | None = None) -> Callable[..., object]:
    """The grader called `name`, or the function at `module:function`, with `options` bound as keyword arguments.

    A user's function takes (prompt, response, answer, extra) and may return a number, None or a Score; read what it
    returns with `score.as_score`.

    Raises:
        ValueError: a name that is neither, or a path that does not lead to a function.
    """
    if ":" not in name:
        if name not in GRADERS:
            raise ValueError(f"grader is {name!r}; known are {sorted(GRADERS)}, or give module:function")
        function: Callable[..., object] = GRADERS[name]
    else:
        function = _load(name)
    return functools.partial(function, **options) if options else function


def _load(path: str) -> Callable[..., object]:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"grader {path!r}: {module_name!r} does not import: {error}") from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(f"grader {path!r}: {module_name!r} has no function {function_name!r}")
    return function
