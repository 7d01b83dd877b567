"""YAML as people mean it: version 1.2 scalars, keys that are texts, and no key twice.

PyYAML follows YAML 1.1, where `off` is false, `1e-6` a string and `1:30` the number 90; each has cost somebody a run.
Nothing but plain data is ever built, so a config cannot run code; tags (`!!int`) are left out for the same reason.
"""

import re
from collections.abc import Hashable
from typing import Any, cast

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent, CollectionStartEvent, Event, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode

_DEEPEST = 64
"""Sections inside sections; no config comes near, and Python's own limit ends in a traceback."""
_MOST_DIGITS = 4000
"""Of a whole number; Python reads no more than 4,300."""
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class PlainLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans, nulls and numbers, which refuses duplicate keys, tags and cycles."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []
        """Anchors of the nodes that are being read, the outermost first."""

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Read one node. Raises ComposerError for a tag, a node that holds itself, and nodes too deep to be meant."""
        event = cast("NodeEvent", self.peek_event())  # pyright: ignore[reportUnknownMemberType] - PyYAML's stubs
        if isinstance(event, AliasEvent):
            if event.anchor in self._open:
                raise _refused(event, f"*{event.anchor} stands inside what &{event.anchor} names; write it out")
            return super().compose_node(parent, index)
        tag = cast("CollectionStartEvent", event).tag  # a scalar has one as well
        if tag not in (None, "!"):
            raise _refused(event, f"the value has a tag, {tag}; write it plain, a text in quotes")
        if len(self._open) >= _DEEPEST:
            raise _refused(event, f"more than {_DEEPEST} sections or lists stand inside each other")
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping. Raises ConstructorError when a key stands twice in it."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key_node.tag not in _KEY_TAGS:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value} is no text; write it in quotes", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key_node.value!r} stands twice in one section; keep one of them",
                    key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _refused(event: Event, why: str) -> ComposerError:
    return ComposerError(None, None, why, event.start_mark)


def _plain_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _plain_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > _MOST_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"the number has {len(text)} digits; {_MOST_DIGITS} are read", node.start_mark
        )
    return int(text, 10)


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (_NUMBER + r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+0123456789.")),
    "merge": (r"<<", ["<"]),
}


class PlainDumper(yaml.SafeDumper):
    """SafeDumper that quotes what `PlainLoader` would not read as a text, `1e5` for one."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for _tag, (_pattern, _first) in _RESOLVERS.items():
    _compiled = re.compile(f"^(?:{_pattern})$")
    for _class in (PlainLoader, PlainDumper):
        _class.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] - PyYAML's stubs leave it bare
            f"tag:yaml.org,2002:{_tag}", _compiled, _first
        )
PlainLoader.add_constructor("tag:yaml.org,2002:float", _plain_float)
PlainLoader.add_constructor("tag:yaml.org,2002:int", _plain_int)


def read_plain_yaml(text: str) -> object:
    """The data in `text`. Raises yaml.YAMLError, with line and column, for anything malformed."""
    return yaml.load(text, Loader=PlainLoader)


def write_plain_yaml(data: object) -> str:
    """Text that `read_plain_yaml` reads back as equal plain data, keys in their order."""
    return yaml.dump(data, Dumper=PlainDumper, sort_keys=False)
