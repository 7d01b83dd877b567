"""Code that a response holds, run against tests: which programs to run, and what their outputs are worth.

Nothing is executed here. Expected outputs and values stay on this side: a program that is graded never sees them, so it
cannot print them without computing them. Only `asserts` hand their expectation to the program; prefer the other two.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "py", "python3", "")
_LARGEST_FLOAT = 2**1023
"""Numbers from here on are compared as they are: a whole one may have no float."""
_RELATIVE_TOLERANCE = 1e-6
"""For float values of calls; everything else is compared exactly."""

Run = tuple[str, str]
"""(program, standard input)."""
Output = tuple[bool, str]
"""(ended well, standard output)."""


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests of one row, from its answer or its `extra["tests"]`: a JSON object (or its text) with any of

    {"io": [{"input": "1 2", "output": "3"}],
     "calls": {"function": "add", "cases": [{"args": [1, 2], "expected": 3}]},
     "asserts": ["assert add(1, 2) == 3"]}
    """

    io: tuple[tuple[str, str], ...] = ()
    function: str = ""
    cases: tuple[tuple[tuple[Any, ...], Any], ...] = ()
    asserts: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.io) + len(self.cases) + len(self.asserts)


def extract_code(response: str) -> str | None:
    """The last Python block of a response; the whole response when it has no block and parses; else None.

    >>> extract_code("First:\\n```python\\nx = 1\\n```\\nor better\\n```\\nx = 2\\n```")
    'x = 2\\n'
    """
    blocks = [code for language, code in _FENCE.findall(response) if language.lower() in _PYTHON]
    if blocks:
        return blocks[-1]
    if "```" in response or not response.strip():
        return None
    try:
        compile(response, "response", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    return response


def read_tests(answer: Any, extra: Mapping[str, Any]) -> Tests:
    """The tests of a row. Raises ValueError for a row without any, or with something else in their place."""
    found: Any = extra.get("tests", answer)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"the row's tests are no JSON: {found[:60]!r}") from error
    if isinstance(found, list):
        found = {"asserts": found}
    if not isinstance(found, dict) or not set(found) & {"io", "calls", "asserts"}:
        raise ValueError(f"the row's tests are {str(found)[:60]!r}; give an object with io, calls or asserts")
    calls = found.get("calls") or {}
    if not isinstance(calls, dict):
        raise ValueError(f"the row's calls are {str(calls)[:60]!r}; give an object with function and cases")
    function, cases = calls.get("function"), _objects(calls, "cases", ("args", "expected"))
    if cases and not (isinstance(function, str) and function):
        raise ValueError(f"the row's calls name function {function!r:.60}; give the name of the function to call")
    for case in cases:
        if not isinstance(case["args"], list):
            raise ValueError(f"the row has a case whose args are {case['args']!r:.60}; give a list")
    asserts = _list(found, "asserts")
    for line in asserts:
        if not isinstance(line, str):
            raise ValueError(f"the row has {line!r:.60} among its asserts; give lines of Python")
    tests = Tests(
        io=tuple((str(test["input"]), str(test["output"])) for test in _objects(found, "io", ("input", "output"))),
        function=function if isinstance(function, str) else "",
        cases=tuple((tuple(case["args"]), case["expected"]) for case in cases),
        asserts=tuple(asserts),
    )
    if not tests.count:
        raise ValueError("the row has no test; a response without a test cannot be scored")
    return tests


def _list(held: Mapping[str, Any], name: str) -> list[Any]:
    value = held.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"the row's {name} are {str(value)[:60]!r}; give a list")
    return value


def _objects(held: Mapping[str, Any], name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    found = _list(held, name)
    for one in found:
        if not isinstance(one, dict) or not set(keys) <= set(one):
            raise ValueError(f"the row has {str(one)[:60]!r} among its {name}; give objects with {' and '.join(keys)}")
    return found


def plan_runs(response: str, answer: Any, extra: Mapping[str, Any]) -> list[Run]:
    """The programs whose outputs `score_outputs` wants; none for a response without code.

    Raises ValueError as `read_tests` does.
    """
    tests = read_tests(answer, extra)
    code = extract_code(response)
    if code is None:
        return []
    runs = [(code, given) for given, _ in tests.io]
    if tests.cases:
        arguments = json.dumps([list(args) for args, _ in tests.cases])
        runs.append((_CALLS.format(code=code, function=tests.function, arguments=arguments), ""))
    if tests.asserts:
        runs.append((_ASSERTS.format(code=code, asserts=list(tests.asserts)), ""))
    return runs


def score_outputs(answer: Any, extra: Mapping[str, Any], outputs: Sequence[Output], *, partial: bool = False) -> float:
    """1 when every test passed, else 0; with `partial` the share of tests that passed.

    `outputs` in the order of `plan_runs`; missing ones failed.
    """
    tests = read_tests(answer, extra)
    rest = list(outputs)
    passed = 0
    for _, expected in tests.io:
        ended_well, stdout = rest.pop(0) if rest else (False, "")
        passed += ended_well and _lines(stdout) == _lines(expected)
    if tests.cases:
        values = _values(rest.pop(0)[1] if rest else "")
        passed += sum(index in values and is_same(values[index], case[1]) for index, case in enumerate(tests.cases))
    if tests.asserts:
        values = _values(rest.pop(0)[1] if rest else "")
        passed += sum(values.get(index) is True for index in range(len(tests.asserts)))
    return passed / tests.count if partial else float(passed == tests.count)


def is_same(value: Any, expected: Any) -> bool:
    """Equal as JSON, within a millionth where either is a float; True is not 1.

    >>> is_same([0.1 + 0.2, "a"], [0.3, "a"]), is_same(True, 1), is_same(1_000_001, 1_000_000)
    (True, False, False)
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        is_whole = isinstance(value, int) and isinstance(expected, int)
        if is_whole or max(abs(value), abs(expected)) >= _LARGEST_FLOAT:
            return value == expected
        return math.isclose(value, expected, rel_tol=_RELATIVE_TOLERANCE)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(is_same(*pair) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(is_same(value[key], expected[key]) for key in expected)
    return type(value) is type(expected) and value == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _values(stdout: str) -> dict[int, Any]:
    """Index -> value, of the lines that a driver wrote; the first line of an index counts."""
    values: dict[int, Any] = {}
    for line in stdout.splitlines():
        try:
            index, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(index, int):
            values.setdefault(index, value)
    return values


_DRIVER = """
import json, os, sys
_out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
_space = {{"__name__": "solution"}}
exec(compile({code!r}, "solution.py", "exec"), _space)
"""
"""What the solution prints goes nowhere; results go to the output that it does not know of."""
_CALLS = (
    _DRIVER
    + """
for _index, _args in enumerate(json.loads({arguments!r})):
    try:
        _line = json.dumps([_index, _space[{function!r}](*_args)])
    except Exception:
        continue
    print(_line, file=_out, flush=True)
"""
)
_ASSERTS = (
    _DRIVER
    + """
for _index, _line in enumerate({asserts!r}):
    try:
        exec(_line, _space)
    except Exception:
        continue
    print(json.dumps([_index, True]), file=_out, flush=True)
"""
)
