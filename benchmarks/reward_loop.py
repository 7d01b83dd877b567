"""How much a step grows by graders of 200 ms on 64 responses, through a real reward worker group.

`python -m benchmarks.reward_loop [--json]`. The rollout is a script that finishes 64 responses over two seconds (or all
at once); a step is that rollout and the `score` call behind it. Growth is against the same step with a grader that
takes no time, in pairs within one run; medians, the spread beside them.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from configs.environment import apply_defaults
from configs.pools import PoolConfig
from configs.reward import GraderConfig, RewardConfig
from resources.batch import make_shard, ragged_from_rows
from resources.cluster import Cluster
from resources.graders import Grader
from resources.models.character_tokenizer import build_character_tokenizer, save_character_tokenizer
from resources.reward_stream import RewardStream
from resources.worker_group import WorkerGroup, WorkerSpec, start_group
from resources.workers.reward import RewardWorker, finished_rows

RESPONSES = 64
GRADER_SECONDS = 0.2
ROLLOUT_SECONDS = 2.0
PAIRS = 5
TARGET_SECONDS = 0.4
GRADERS = f"""
import asyncio, time
def free(response): return 1.0
def waits(response): time.sleep({GRADER_SECONDS}); return 1.0
async def awaits(response): await asyncio.sleep({GRADER_SECONDS}); return 1.0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One figure of the benchmark."""

    name: str
    value: float
    target: float
    spread: str

    @property
    def is_ok(self) -> bool:
        return self.value <= self.target

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": "s",
            "target": self.target,
            "better": "lower",
            "ok": self.is_ok,
        }


def rollout_batch() -> TensorDict:
    """64 responses to 16 prompts."""
    tokenizer = build_character_tokenizer()
    prompt, response = tokenizer.encode("53172="), [*tokenizer.encode("12357"), tokenizer.eos_token_id]
    record = json.dumps({"prompt": "53172=", "answer": "12357", "source": "sorting", "index": 0, "extra": {}}).encode()
    ids = torch.tensor(prompt + response)
    mask = torch.arange(len(ids)) >= len(prompt)
    return make_shard(
        {
            "row_ids": torch.arange(RESPONSES),
            "group_ids": torch.arange(RESPONSES) // 4,
            "record": ragged_from_rows([torch.tensor(list(record))] * RESPONSES, torch.uint8),
            "input_ids": ragged_from_rows([ids] * RESPONSES, torch.int64),
            "response_mask": ragged_from_rows([mask] * RESPONSES, torch.bool),
            "finish_reasons": torch.zeros(RESPONSES, dtype=torch.int8),
            "response_lengths": torch.full((RESPONSES,), len(response)),
        }
    )


def step_seconds(
    group: WorkerGroup, rows: TensorDict, batch_id: str, *, rollout_seconds: float, streams: bool
) -> float:
    """One rollout of `rollout_seconds` and what scoring takes behind it."""
    finished = finished_rows(rows)
    stream = RewardStream(group, batch_id)
    started = time.monotonic()
    for number, row in enumerate(finished):
        due = started + rollout_seconds * (number + 1) / RESPONSES
        time.sleep(max(0.0, due - time.monotonic()))
        if streams:
            stream([row])
    [(status, _)] = group.call("score", batch_id, rows)
    assert status["metrics"]["reward/score_mean"] == RESPONSES
    return time.monotonic() - started


@contextlib.contextmanager
def reward_groups() -> Iterator[dict[str, WorkerGroup]]:
    """A reward worker for each grader, with two processes each."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "bench_graders.py").write_text(GRADERS)
        save_character_tokenizer(folder / "tokenizer")
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        cluster = stack.enter_context(
            Cluster("reward-benchmark", address="local", num_cpus=8, run_dir=folder, object_store_bytes=200_000_000)
        )
        kinds = ("free", "waits", "awaits")
        cluster.reserve({kind: PoolConfig(nodes=(1,)) for kind in kinds})
        config = RewardConfig(graders=(GraderConfig(name="unused", function="exact_answer"),), processes=2)
        groups = {}
        for kind in kinds:
            grader = Grader(name=kind, kind="python", function=f"bench_graders:{kind}")
            spec = WorkerSpec(
                role="reward",
                worker=RewardWorker,
                args=(config, str(folder / "tokenizer"), (grader,)),
                env={"PYTHONPATH": os.environ["PYTHONPATH"]},
                rendezvous=False,
            )
            groups[kind] = start_group(cluster, cluster.pools[kind], spec, name=f"reward-{kind}")
        yield groups


def measure() -> list[Result]:
    """Growth of the step in each case."""
    cases = {
        "streamed": ("waits", ROLLOUT_SECONDS, True, TARGET_SECONDS),
        "streamed, async grader": ("awaits", ROLLOUT_SECONDS, True, TARGET_SECONDS),
        "all finished at once": ("waits", 0.0, True, 2 * TARGET_SECONDS),
        "not streamed": ("waits", ROLLOUT_SECONDS, False, 2 * TARGET_SECONDS),
    }
    rows = rollout_batch()
    results = []
    with reward_groups() as groups:
        for kind, group in groups.items():
            step_seconds(group, rows, f"warm-{kind}", rollout_seconds=0.0, streams=True)
        for name, (kind, rollout_seconds, streams, target) in cases.items():
            growth = []
            for pair in range(PAIRS):
                settings = {"rollout_seconds": rollout_seconds, "streams": streams}
                plain = step_seconds(groups["free"], rows, f"{name}-{pair}", **settings)
                graded = step_seconds(groups[kind], rows, f"{name}-{pair}", **settings)
                growth.append(graded - plain)
            spread = f"{min(growth):.3f} to {max(growth):.3f}"
            results.append(
                Result(name=f"step growth, {name}", value=statistics.median(growth), target=target, spread=spread)
            )
    return results


def main() -> int:
    """Print the figures; 0 when all are within their targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    apply_defaults()
    results = measure()
    if not options.json:
        serial, load = RESPONSES * GRADER_SECONDS, os.getloadavg()[0]
        print(f"{RESPONSES} responses of {GRADER_SECONDS:g} s each, {serial:g} s one after another; load {load:.1f}")
    for result in results:
        line = f"{result.name:42s} {result.value:7.3f} s  (target {result.target:g}; {result.spread})"
        print(json.dumps(result.to_json()) if options.json else line)
    return 0 if all(result.is_ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
