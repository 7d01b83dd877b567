"""The tables of docs/scaling.md: what was measured here, carried to 8, 64 and 1,024 accelerators.

    python -m benchmarks.scaling

Controller: seconds of a no-op iteration by number of ranks, a line through the points of docs/growth/figures.json (two
cores that also ran the workers, so an upper bound). Work: the roofline of `resources/telemetry/study.py`, a 7B model
with 2,048 tokens a response. Both go through the simulator behind `callsheet whatif`, rows growing with accelerators.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from resources.telemetry.profile import RunProfile
from resources.telemetry.study import GROUP_SIZE, NETWORK_BYTES_PER_SECOND, PROMPTS, Workload, synthetic_profile
from resources.telemetry.topology import Topology, measured_topology
from resources.telemetry.whatif import predict

FIGURES = Path(__file__).resolve().parent.parent / "docs/growth/figures.json"
SIZES = (8, 64, 1024)
WORK = Workload(parameters=7e9, response_tokens=2048, reward="rule", accelerators=8)
PER_NODE = 8
TOKEN_BYTES = {
    "input_ids": 8,
    "response_mask": 1,
    "rollout_log_probs": 4,
    "old_log_probs": 4,
    "entropy": 4,
    "ref_log_probs": 4,
    "values": 4,
    "token_rewards": 4,
    "advantages": 4,
    "returns": 4,
    "train_mask": 1,
}
"""Bytes a token of a PPO iteration leaves in the store, by column."""
TRAINED = (
    "input_ids",
    "response_mask",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "train_mask",
)
SPAN_BYTES = 2_200
"""A rank's spans of one iteration in spans.jsonl (142 MiB for 1,000 iterations of 64 ranks)."""
STAGES = 5
"""Tasks one after another on the path of an iteration: what the controller adds is spread over them."""


def controller_line(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(seconds, seconds a rank): the straight line closest to (ranks, seconds)."""
    slope, intercept = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return intercept, slope


def layouts(profile: RunProfile, accelerators: int) -> dict[str, Topology]:
    """One fused pool, and engines and trainers apart with the rollout one iteration ahead; rows by accelerators."""
    base = replace(measured_topology(profile), prompts_per_iteration=PROMPTS * accelerators // 8)
    cpu = max(8, accelerators)
    models = ("rollout", "actor", "critic", "reference")
    fused = replace(base, pools={"main": accelerators, "cpu": cpu}, colocate=dict.fromkeys(models, "fused"))
    engines = accelerators // 2
    apart = replace(
        base,
        pools={"engines": engines, "train": accelerators - engines, "cpu": cpu},
        roles={**base.roles, "rollout": "engines", "actor": "train", "critic": "train", "reference": "train"},
        accelerator_pools=frozenset({"engines", "train"}),
        colocate=dict.fromkeys(models[1:], "fused"),
        async_depth=1,
    )
    return {"fused": fused, "split, async_depth 1": apart}


def with_controller(profile: RunProfile, seconds: float) -> RunProfile:
    """The profile with the controller's seconds of an iteration on its path."""
    tasks = {name: replace(task, overhead_seconds=seconds / STAGES) for name, task in profile.tasks.items()}
    return replace(profile, tasks=tasks)


def main() -> int:
    """Print both tables."""
    fixed, per_rank = controller_line(json.loads(FIGURES.read_text())["ranks"])
    print(f"controller: {fixed:.3f} s + {per_rank * 1e3:.2f} ms a rank\n")
    print("| accelerators | layout | rows | step | held by | controller | of the step |")
    print("|--:|---|--:|--:|---|--:|--:|")
    profile = synthetic_profile(WORK)
    for accelerators in SIZES:
        controller = fixed + per_rank * accelerators
        for name, topology in layouts(profile, accelerators).items():
            found = predict(with_controller(profile, controller), topology)
            rows = topology.prompts_per_iteration * GROUP_SIZE
            share = controller / found.step_seconds
            print(f"| {accelerators:,} | {name} | {rows:,} | {found.step_seconds:.0f} s | {found.bottleneck} "
                  f"{found.bottleneck_share:.0%} | {controller:.2f} s | {share:.1%} |")  # fmt: skip
    print("\n| accelerators | into the store | read by a node | of its link | spans a line | weights, 7B bfloat16 |")
    print("|--:|--:|--:|--:|--:|--:|")
    for accelerators in SIZES:
        rows, nodes = PROMPTS * GROUP_SIZE * accelerators // 8, max(1, accelerators // PER_NODE)
        tokens = rows * (WORK.response_tokens + 256)
        stored = tokens * sum(TOKEN_BYTES.values())
        read = tokens * sum(TOKEN_BYTES[name] for name in TRAINED)
        link = read / NETWORK_BYTES_PER_SECOND if nodes > 1 else 0.0
        sync = 2 * WORK.parameters / NETWORK_BYTES_PER_SECOND
        cells = (
            f"{accelerators:,}", f"{stored / 1e9:.2f} GB", f"{read / 1e9:.2f} GB", f"{link:.2f} s",
            f"{accelerators * SPAN_BYTES / 1e6:.2f} MB", f"{sync:.2f} s",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
