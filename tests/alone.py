"""Runs a function in a process of its own, whose limits bind no thread of the tests' process (Ray has some there)."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 120.0
_PROGRAM = """
import pickle, sys
function, args = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(function(*args)))
"""


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), all of which can be pickled. Raises CalledProcessError where it raises; stderr says what."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=pickle.dumps((function, args)),
        stdout=subprocess.PIPE,
        timeout=DEADLINE_SECONDS,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return pickle.loads(ended.stdout)
