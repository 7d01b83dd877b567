"""The JSON schema of a config, for editors: `python -m configs.schema` writes `configs/schema.json` anew."""

import json
from pathlib import Path

from configs.run import RunConfig

SCHEMA_FILE = Path(__file__).parent / "schema.json"


def schema_text() -> str:
    """The schema as it stands in `configs/schema.json`; a test compares the two."""
    schema = RunConfig.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Callsheet run"}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {SCHEMA_FILE}")
