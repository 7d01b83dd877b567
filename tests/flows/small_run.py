"""The quick start with less of everything: two iterations of the whole DAG in well under a minute."""

from pathlib import Path

from configs.load import load_config
from configs.run import RunConfig

SMALL = (
    "iterations=2",
    "model.shape.num_layers=1",
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=64",
    "rollout.engine=huggingface",
    "data.prompts_per_iteration=16",
    "algorithm.num_mini_batches=2",
    "sft.steps=2",
    "sft.batch_size=16",
    "validation.num_prompts=8",
    "validation.every=0",
    "checkpoint.every=1",
    "checkpoint.asynchronous=false",
)


def small(run_dir: Path, name: str, *more: str) -> RunConfig:
    """Its config, with a folder and a name of its own; `more` are further settings `a.b=c`."""
    return load_config("quickstart", [*SMALL, f"run_dir={run_dir}", f"name={name}", *more])
