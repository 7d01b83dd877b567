"""YAML as people mean it: version 1.2 scalars, and no key twice.

PyYAML follows YAML 1.1, where `off` is false, `1e-6` a string and `1:30` the number 90; each has cost somebody a run.
Nothing but plain data is ever built, so a config cannot run code.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode


class PlainLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans, nulls and numbers, which refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping. Raises ConstructorError when a key stands twice in it."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key_node.value!r} stands twice in one section; keep one of them",
                    key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _plain_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _plain_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)), 10)


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (_NUMBER + r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+0123456789.")),
    "merge": (r"<<", ["<"]),
}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    _compiled = re.compile(f"^(?:{_pattern})$")
    PlainLoader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] - PyYAML's stubs leave it bare
        f"tag:yaml.org,2002:{_tag}", _compiled, _first
    )
PlainLoader.add_constructor("tag:yaml.org,2002:float", _plain_float)
PlainLoader.add_constructor("tag:yaml.org,2002:int", _plain_int)


def read_plain_yaml(text: str) -> object:
    """The data in `text`. Raises yaml.YAMLError, with line and column, for anything malformed."""
    return yaml.load(text, Loader=PlainLoader)
