"""The schema that editors read is the one the code has, and accepts the presets."""

import json

import jsonschema
import pytest

from configs.load import PRESETS, preset_names
from configs.reference import DOCUMENT, MARK, reference_text
from configs.schema import SCHEMA_FILE, schema_text
from configs.yaml_reader import read_plain_yaml


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
