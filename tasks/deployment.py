"""A preset as parameters of a Prefect deployment; `prefect.yaml` calls it as a build step."""

from pathlib import Path
from typing import Any

from configs.load import dump_config, load_config


def preset(name: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The whole config of preset `name` and the folder that holds the flows.

    The deployment's form in the UI then shows every value; `overrides` are written as for `--set`.
    """
    config = load_config(name, tuple(overrides or ()))
    return {"config": dump_config(config), "directory": str(Path(__file__).resolve().parents[1])}
