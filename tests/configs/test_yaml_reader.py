"""YAML 1.2 scalars, where PyYAML follows 1.1."""

import math

import pytest
import yaml

from configs.yaml_reader import read_plain_yaml


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
