"""A small cast in one process with the scripted engine, for tests of what the steps do together."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from configs.load import load_config
from configs.run import RunConfig
from resources.local_group import LocalGroup
from tests.tasks.local_run import LocalRun, cast_here

SMALL = (
    "rollout.engine=scripted",
    "data.prompts_per_iteration=8",
    "rollout.group_size=4",
    "model.shape.num_layers=1",
    "model.shape.hidden_size=16",
    "model.shape.intermediate_size=32",
    "validation.num_prompts=16",
    "algorithm.num_mini_batches=2",
    "iterations=3",
)


def small_config(*overrides: str, script: Mapping[str, Any] | None = None) -> RunConfig:
    """The quick start, smaller, with an engine that answers by `script`: right half the time unless it says more."""
    responses = yaml.safe_dump({"responses": dict(script or {"mode": "answer"})}, default_flow_style=True).strip()
    return load_config("quickstart", (*SMALL, f"rollout.scripted={responses}", *overrides))


class SmallCast:
    """Workers that several tests may share: they are told of another config's data, script and graders by `run`."""

    def __init__(self) -> None:
        self.groups = cast_here(small_config())

    def run(self, config: RunConfig, fresh: Sequence[str] = ()) -> LocalRun:
        """A run on the shared workers; duties in `fresh` get workers of their own."""
        idle = set()
        if not config.algorithm.needs_critic:
            idle.add("critic")
        if not config.algorithm.needs_reference or config.model.lora is not None:
            idle.add("reference")
        kept = {duty: group for duty, group in self.groups.items() if duty not in idle and duty not in fresh}
        groups: dict[str, LocalGroup] = cast_here(config, given=kept) if fresh else kept
        run = LocalRun(config, groups)
        run.sync()
        return run

    def close(self) -> None:
        self.groups["reward"].call("close")
