"""A benchmark in a process of its own: the figures it printed, and what went wrong."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a benchmark left."""

    lines: list[dict[str, Any]]
    problem: str = ""
    """Why it did not end well. That a target is missed, and a line says so, is none."""


def run(name: str, arguments: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> Ended:
    """`python -m benchmarks.NAME --json ARGUMENTS` for at most `seconds`."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return Ended(lines=figures_in(text), problem=f"took longer than {seconds:g} s")
    return Ended(lines=figures_in(ended.stdout), problem=problem_of(ended.returncode, ended.stdout, ended.stderr))


def figures_in(output: str) -> list[dict[str, Any]]:
    """The whole lines of JSON; one that a process was ended in is none."""
    return [json.loads(line) for line in output.splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]


def problem_of(status: int, output: str, errors: str) -> str:
    """Why a benchmark that ended with `status` did not end well, '' when it did.

    >>> problem_of(1, '{"ok": true}\\n', "Traceback\\nRayError: gone\\n")
    'exit status 1: RayError: gone'
    >>> problem_of(1, '{"ok": false}\\n', "")
    ''
    """
    lines = figures_in(output)
    if lines and (status == 0 or not all(line["ok"] for line in lines)):
        return ""
    last = (errors.strip().splitlines() or ["no output"])[-1]
    return f"exit status {status}: {last}"
