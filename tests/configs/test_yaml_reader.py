"""YAML 1.2 scalars, where PyYAML follows 1.1."""

import math

import pytest
import yaml

from configs.yaml_reader import read_plain_yaml, write_plain_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3E5", 3e5),
        ("+1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-7", -7),
        ("007", 7),
        ("1:30", "1:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'4'", "4"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_a_scalar_is_read_as_yaml_1_2_has_it(text: str, value: object):
    read = read_plain_yaml(text)
    assert read == value
    assert type(read) is type(value)


def test_infinity_and_nan_are_numbers():
    assert read_plain_yaml("-.inf") == -math.inf
    assert math.isnan(read_plain_yaml(".nan"))


def test_a_merge_key_still_merges():
    assert read_plain_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}")["b"] == {"x": 1, "y": 2}


def test_a_key_that_stands_twice_is_refused_at_any_depth():
    with pytest.raises(yaml.YAMLError, match="'x' stands twice"):
        read_plain_yaml("a:\n  - {x: 1, x: 2}\n")


@pytest.mark.parametrize(
    "tagged", ["!!int x", "!!bool maybe", "!!timestamp 2001-01-01", "!!binary é", "!!set {a}", "!mine 1"]
)
def test_a_tagged_value_is_refused_with_its_place(tagged: str):
    with pytest.raises(yaml.MarkedYAMLError, match="the value has a tag") as caught:
        read_plain_yaml(f"a: 1\nb: {tagged}\n")
    assert caught.value.problem_mark is not None
    assert (caught.value.problem_mark.line, caught.value.problem_mark.column) == (1, 3)


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: *x}", "a: &x\n  b:\n    - c: *x\n"])
def test_a_node_that_holds_itself_is_refused(text: str):
    with pytest.raises(yaml.YAMLError, match=r"\*x stands inside what &x names"):
        read_plain_yaml(text)


def test_an_alias_may_be_used_again_and_again():
    assert read_plain_yaml("a: &x [1]\nb: [*x, *x]\nc: *x") == {"a": [1], "b": [[1], [1]], "c": [1]}


@pytest.mark.parametrize("text", ["[" * 3000, "a: " + "[" * 3000 + "]" * 3000, "{a: " * 100 + "1" + "}" * 100])
def test_what_is_nested_too_deep_to_be_meant_is_refused(text: str):
    with pytest.raises(yaml.YAMLError, match="stand inside each other"):
        read_plain_yaml(text)


@pytest.mark.parametrize("key", ["1", "null", "true", "1.5", "~"])
def test_a_key_that_is_no_text_is_refused(key: str):
    with pytest.raises(yaml.YAMLError, match=f"key {key} is no text; write it in quotes"):
        read_plain_yaml(f"a: {{{key}: 2}}")


def test_a_number_of_more_digits_than_python_reads_is_refused():
    with pytest.raises(yaml.YAMLError, match="the number has 5000 digits"):
        read_plain_yaml("9" * 5000)


@pytest.mark.parametrize(
    "text", ["1e5", "08", "3.", "yes", "off", "true", "null", "12:30", "1_000", "0x1f", "", "- a", "é"]
)
def test_a_text_that_looks_like_something_else_is_written_so_that_it_stays_one(text: str):
    assert read_plain_yaml(write_plain_yaml({"name": text, "list": [text]})) == {"name": text, "list": [text]}


@pytest.mark.parametrize("value", [1e-6, 3e5, 1e16, -7, True, None, math.inf])
def test_a_value_is_written_so_that_it_keeps_its_type(value: object):
    again = read_plain_yaml(write_plain_yaml([value]))
    assert again == [value]
    assert isinstance(again, list)
    assert type(again[0]) is type(value)
