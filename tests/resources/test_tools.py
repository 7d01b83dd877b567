"""Tools: schemas from type hints, calls found in text, and every failure a text that the policy can read."""

import time
from typing import Literal

import pytest

from resources.agent_loop import Turn
from resources.tools.calculator import calculate
from resources.tools.calls import find_calls, make_call
from resources.tools.responder import MAX_CALLS, ToolResponder
from resources.tools.schema import Tool, ToolError, describe_tool, load_tools


def look_up(city: str, unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> dict[str, float]:
    """The weather of a city.

    More of it.

    Args:
        city: its name,
            in any language.
        unit: of the temperature.
    """
    return {"high": 21.5 if unit == "C" else 70.7, "days": float(len(days or []))}


def hang(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "late"


TOOLS = {tool.name: tool for tool in map(describe_tool, (look_up, hang, calculate))}


def test_the_schema_holds_types_descriptions_and_what_is_required() -> None:
    function = describe_tool(look_up).schema()["function"]
    assert function["description"] == "The weather of a city. More of it."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name, in any language."},
            "unit": {"enum": ["C", "F"], "description": "of the temperature."},
            "days": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_a_parameter_without_a_hint_or_of_a_type_json_lacks_is_refused_by_name() -> None:
    def bare(x):
        return x

    def odd(x: complex) -> str:
        return str(x)

    with pytest.raises(ToolError, match="tool 'bare': parameter 'x' has no type hint"):
        describe_tool(bare)
    with pytest.raises(ToolError, match=r"odd\.x is a <class 'complex'>"):
        describe_tool(odd)


def test_tools_are_loaded_by_path_and_a_wrong_path_is_named() -> None:
    assert set(load_tools(("resources.tools.calculator:calculate",))) == {"calculate"}
    with pytest.raises(ToolError, match="has no function or class 'subtract'"):
        load_tools(("resources.tools.calculator:subtract",))
    with pytest.raises(ToolError, match=r"'no\.such' does not import"):
        load_tools(("no.such:thing",))
    with pytest.raises(ToolError, match="two tools are named 'calculate'"):
        load_tools(("resources.tools.calculator:calculate",) * 2)


def answers(text: str, notation: Literal["json", "inline"] = "json") -> list[str]:
    return [make_call(call, TOOLS)[0] for call in find_calls(text, notation, TOOLS)]


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_several_json_calls_of_one_turn_are_made_in_order() -> None:
    text = "first " + call('{"name": "look_up", "arguments": {"city": "Rom"}}') + " then "
    text += call('{"name": "calculate", "arguments": "{\\"expression\\": \\"2*3\\"}"}')
    assert answers(text) == ['{"high": 21.5, "days": 0.0}', "6"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{name: look_up}", "error: the tool call is not JSON: Expecting property name"),
        ('{"name": "look_up", "arguments": {"city": "Rom"}', "error: the tool call is not JSON: Expecting ',' delim"),
        ('["look_up"]', 'error: a tool call is {"name": ..., "arguments": {...}}'),
        ('{"name": "fly", "arguments": {}}', "error: there is no tool 'fly'; tools are calculate, hang, look_up"),
        ('{"name": "look_up", "arguments": {}}', "error: look_up takes city, unit, days: argument city is miss"),
        ('{"name": "look_up", "arguments": {"city": 3}}', "error: argument city is 3, which is no string"),
        (
            '{"name": "look_up", "arguments": {"city": "R", "x": 1}}',
            "error: look_up takes city, unit, days: no argumen",
        ),
        (
            '{"name": "look_up", "arguments": {"city": "R", "unit": "K"}}',
            "error: argument unit is 'K', which is no val",
        ),
        ('{"name": "look_up", "arguments": [1]}', "error: arguments are [1]; give an object"),
        ('{"name": "hang", "arguments": {"seconds": true}}', "error: argument seconds is True, which is no number"),
        ('{"name": "calculate", "arguments": {"expression": "1/0"}}', "error: ValueError: division by zero"),
        ("[" * 100_000, "error: the tool call is nested too deep"),
    ],
)
def test_a_bad_call_becomes_a_text_that_says_why(body: str, said: str) -> None:
    (text,) = answers(call(body))
    assert text.startswith(said)


def test_a_call_that_was_cut_off_is_read_as_a_broken_one() -> None:
    assert answers('<tool_call>{"name": "calc')[0].startswith("error: the tool call is not JSON")


def test_inline_calls_and_what_only_looks_like_one() -> None:
    assert answers("so [calculate(2*(3+4)=)]", "inline") == ["14"]
    assert answers("[calculate 2*3]", "inline") == ["error: write a call as [look_up(...)]"]
    assert answers("[fly(1)]", "inline")[0].startswith("error: there is no tool 'fly'")
    assert answers("plain 12]", "inline") == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34+5=", "413"), ("7-10", "-3"), ("1/3+1/6", "1/2"), ("0.5*4", "2"), ("-(2+3)*-4", "20")],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "2**9", "__import__('os')", "a+1", "1" * 300, "9" * 59 + "*99", "True+1"])
def test_the_calculator_takes_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|only numbers|digits"):
        calculate(expression)


def turn(text: str, row_id: int = 0) -> Turn:
    return Turn(row_id=row_id, group_id=0, number=1, text=text, record=b"{}")


def test_a_tool_that_hangs_is_told_in_time_and_its_neighbours_answer() -> None:
    responder = ToolResponder(TOOLS, "inline", timeout_seconds=0.3)
    slow = {"hang": Tool(name="hang", description="", function=lambda x: hang(30.0), parameters={"x": {}}, required=())}
    responder.tools |= slow
    late, quick = responder.respond([turn("[hang(1)]"), turn("[calculate(1+1)]", 1)])
    assert late.texts == ("error: no answer within 0.3 s",)
    assert (late.num_calls, late.num_errors, late.is_last) == (1, 1, False)
    assert (quick.texts, quick.num_errors) == (("2",), 0)


def test_a_turn_full_of_calls_gets_some_made_and_the_others_refused() -> None:
    answer = ToolResponder(TOOLS, "inline", 5.0).respond([turn("[calculate(1+1)]" * (MAX_CALLS + 2))])[0]
    assert answer.texts[:MAX_CALLS] == ("2",) * MAX_CALLS
    assert answer.texts[MAX_CALLS:] == ("error: only 8 calls a turn are made",) * 2


def answer(how: str) -> object:
    """Answer in a way that a tool should not.

    Args:
        how: which.
    """
    if how == "exit":
        raise SystemExit(3)
    ring: list[object] = []
    ring.append(ring)
    return {"ring": ring, "half": "a\ud800b", "inside": {"text": "\udc00"}, "deep": RecursionError("deep")}[how]


@pytest.mark.parametrize(
    ("how", "text", "is_result"),
    [
        ("exit", "error: SystemExit: 3", False),
        ("ring", "error: ValueError: Circular reference detected", False),
        ("half", "a?b", True),
        ("inside", '{"text": "?"}', True),
        ("nothing", "error: KeyError: 'nothing'", False),
    ],
)
def test_whatever_a_tool_does_the_model_gets_a_text(how: str, text: str, is_result: bool) -> None:
    assert describe_tool(answer).call({"how": how}) == (text, is_result)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "double", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "double", "arguments": "' + "9" * 5000 + '"}',
        '{"name": "double", "arguments": "' + "[" * 5000 + '"}',
        "[" * 5000,
        '{"a":' * 5000,
    ],
)
def test_a_call_that_python_cannot_read_is_told_as_such(body: str) -> None:
    (call,) = find_calls(f"<tool_call>{body}</tool_call>", "json", {})
    assert call.problem is not None
    assert "is nested too deep, or holds a number of too many digits" in make_call(call, {})[0]
