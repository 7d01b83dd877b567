"""The schema that editors read is the one the code has, and accepts the presets."""

import ast
import json
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from pydantic import BaseModel

from configs.load import PRESETS, preset_names
from configs.reference import DOCUMENT, MARK, reference_text
from configs.run import RunConfig
from configs.schema import SCHEMA_FILE, schema_text
from configs.yaml_reader import read_plain_yaml

ROOT = Path(__file__).parents[2]


def test_the_stored_schema_is_current():
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run: python -m configs.schema"


@pytest.mark.parametrize("name", preset_names())
def test_the_schema_accepts_the_preset(name: str):
    jsonschema.validate(read_plain_yaml((PRESETS / f"{name}.yaml").read_text()), json.loads(schema_text()))


def test_the_schema_refuses_an_unknown_key():
    data = read_plain_yaml((PRESETS / "quickstart.yaml").read_text()) | {"learning_rate": 1}
    with pytest.raises(jsonschema.ValidationError, match="learning_rate"):
        jsonschema.validate(data, json.loads(schema_text()))


def test_the_reference_of_all_keys_is_current():
    written = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[2]
    assert written == "\n" + reference_text(), "run: python -m configs.reference"


def _sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    found = {section}
    waiting: list[object] = [field.annotation for field in section.model_fields.values()]
    while waiting:
        one = waiting.pop()
        waiting += get_args(one)
        if isinstance(one, type) and issubclass(one, BaseModel) and one not in found:
            found |= _sections(one)
    return found


def test_every_key_is_read_by_some_code():
    """A key that nothing reads is a promise that the run does not keep."""
    read: set[str] = set()
    for room in ("configs", "resources", "tasks", "flows"):
        for path in (ROOT / room).rglob("*.py"):
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    unread = {
        f"{section.__name__}.{name}" for section in _sections(RunConfig) for name in section.model_fields
        if name not in read
    }  # fmt: skip
    assert unread == {"ModelConfig.trust_remote_code"}, "which exists to be refused"
