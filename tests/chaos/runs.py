"""Tiny whole runs for the chaos tests, and what must be the same bits in two of them."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.load import check_config
from configs.run import RunConfig
from resources.checkpoints import CheckpointStore
from resources.run_directory import read_lines
from tasks.watchers import Progress, watching

FREE_TO_DIFFER = ("time/", "system/", "recovery/")
FUSED_ROLES = ("actor", "rollout", "reference", "critic")
FUSED = {
    "pools": {"main": {"nodes": [1], "cpus_per_bundle": 1}},
    "roles": {
        **{role: {"pool": "main", "colocate": "fused", "workers": 1} for role in FUSED_ROLES},
        "reward": {"pool": "main", "colocate": "shared", "workers": 1},
    },
}  # fmt: skip
SPLIT = {
    "pools": {
        "learn": {"nodes": [1], "cpus_per_bundle": 1},
        "sample": {"nodes": [1], "cpus_per_bundle": 1},
        "judge": {"nodes": [1], "cpus_per_bundle": 1},
    },
    "roles": {
        "actor": {"pool": "learn", "workers": 1},
        "critic": {"pool": "learn", "workers": 1},
        "reference": {"pool": "judge", "workers": 1},
        "rollout": {"pool": "sample", "workers": 2},
        "reward": {"pool": "judge", "workers": 1},
    },
}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {"fused": FUSED, "split": SPLIT}


def tiny_config(
    run_dir: Path, name: str, layout: str = "fused", iterations: int = 12, engine: str = "huggingface", **sections: Any
) -> RunConfig:
    """PPO with critic and reference on a model of a few thousand parameters; `sections` are merged over it."""
    plain: dict[str, Any] = {
        "name": name,
        "seed": 7,
        "iterations": iterations,
        "run_dir": str(run_dir),
        "model": {
            "build": "tiny",
            "shape": {
                "num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "vocab_size": 128,
                "max_positions": 32,
            },
        },
        "algorithm": {"name": "ppo", "gae_lambda": 0.95, "kl": {"coef": 0.02}, "num_mini_batches": 2},
        "data": {
            "prompts_per_iteration": 16,
            "max_prompt_length": 8,
            "sources": [{"name": "sorting", "kind": "sorting", "size": 200, "seed": 1, "options": {"num_digits": 3}}],
        },
        "rollout": {"engine": engine, "max_response_length": 5, "max_running_sequences": 32},
        "reward": {
            "graders": [{"name": "places", "kind": "rule", "function": "positions_right"}],
            "processes": 1,
        },
        "actor": {"optimizer": {"lr": 1e-3}, "micro_batch_size": 8},
        "critic": {"optimizer": {"lr": 1e-3}, "micro_batch_size": 8},
        "checkpoint": {"every": 5},
        "recovery": {"max_recoveries": 64, "backoff_seconds": 0.05},
        "ray": {"object_store_bytes": 200_000_000, "num_cpus": 8},
        **LAYOUTS[layout],
    }  # fmt: skip
    if engine == "scripted":
        plain["rollout"]["scripted"] = {"responses": {"mode": "random", "max_length": 5}, "seconds_per_token": 0.002}
    if engine == "vllm":
        plain["rollout"]["kv_cache_bytes"] = "64MiB"
        plain["model"]["shape"]["num_heads"] = 1  # vLLM has no attention for heads of 16 on a CPU
    for section, values in sections.items():
        plain[section] = {**plain[section], **values} if isinstance(values, Mapping) and section in plain else values
    return check_config(plain, name)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metric lines of a run, without what may differ between two runs of the same bits."""
    lines = read_lines(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(FREE_TO_DIFFER)} for line in lines]


def final_checksums(run: Path) -> dict[str, str]:
    """Checksums of every file of the last checkpoint: weights, moments, counters, random streams."""
    store = CheckpointStore(run / "checkpoints")
    newest, _ = store.latest()
    assert newest is not None
    return dict(newest.checksums)


def assert_same_run(disturbed: Path, undisturbed: Path) -> None:
    """Same iterations, each once and in order; same bits in metrics, weights, moments and random streams."""
    seen, expected = metrics_of(disturbed), metrics_of(undisturbed)
    assert [line["iteration"] for line in seen] == list(range(len(expected)))
    different = [
        (one["iteration"], name, value, one.get(name))
        for one, other in zip(seen, expected, strict=True)
        for name, value in other.items()
        if json.dumps(one.get(name)) != json.dumps(value)
    ]
    assert not different, different[:5]
    assert final_checksums(disturbed) == final_checksums(undisturbed)


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, in order."""
    return [event for event in read_lines(run / "events.jsonl") if event["kind"] == kind]


@contextmanager
def commit_times(ended: dict[int, float]) -> Iterator[None]:
    """Runs inside the block note when each iteration was committed, on the monotonic clock."""

    def note(progress: Progress) -> None:
        ended[progress.iteration] = time.monotonic()

    with watching(note):
        yield
