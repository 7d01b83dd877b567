"""The tables of docs/scaling.md: what was measured on two cores, carried to 8, 64 and 1,024 accelerators.

    python -m benchmarks.scaling

Controller: the bound of `benchmarks.controller_tax` for an iteration, and the empty calls of `benchmarks.dispatch` at 2
to 64 workers on two cores that also ran the workers, so an upper bound. Work: the roofline of
`resources/telemetry/study.py`, a 7B model with 2,048 tokens a response. Both go through the simulator behind `callsheet
whatif`.
"""

import statistics
import sys
from dataclasses import replace

from resources.telemetry.profile import RunProfile
from resources.telemetry.study import GROUP_SIZE, NETWORK_BYTES_PER_SECOND, Workload, synthetic_profile
from resources.telemetry.topology import Topology, measured_topology
from resources.telemetry.whatif import predict

EMPTY_CALLS = ((2, 1.11e-3), (8, 3.9e-3), (32, 20.4e-3), (64, 46e-3))
"""(workers, seconds) of one call to all of them."""
ITERATION_SECONDS = 0.30
"""Most that an iteration of no-op steps may cost, see `benchmarks.controller_tax`."""
CALLS = 9
"""Steps of an iteration that call their role's ranks."""
SIZES = ((8, 1024), (64, 8192), (1024, 8192), (1024, 131_072))
"""(accelerators, rows of an iteration): rows that grow with the machine, and rows that stay."""
WORK = Workload(parameters=7e9, response_tokens=2048, reward="rule", accelerators=8)
PER_NODE = 8
TOKEN_BYTES = {
    "input_ids": 8,
    "response_mask": 1,
    "rollout_log_probs": 4,
    "old_log_probs": 4,
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


def controller_seconds(ranks: int) -> float:
    """Of an iteration whose steps each call `ranks` workers."""
    slope, intercept = statistics.linear_regression(*zip(*EMPTY_CALLS, strict=True))
    return ITERATION_SECONDS + CALLS * (intercept + slope * ranks)


def layouts(profile: RunProfile, accelerators: int, rows: int) -> dict[str, Topology]:
    """One fused pool, and engines and trainers apart with the rollout one iteration ahead."""
    base = replace(measured_topology(profile), prompts_per_iteration=rows // GROUP_SIZE)
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
    print("| accelerators | layout | rows | step | held by | controller | of the step |")
    print("|--:|---|--:|--:|---|--:|--:|")
    profile = synthetic_profile(WORK)
    for accelerators, rows in SIZES:
        for name, topology in layouts(profile, accelerators, rows).items():
            controller = controller_seconds(topology.ranks_of("actor"))
            found = predict(with_controller(profile, controller), topology)
            share = controller / found.step_seconds
            print(f"| {accelerators:,} | {name} | {rows:,} | {found.step_seconds:.0f} s | {found.bottleneck} "
                  f"{found.bottleneck_share:.0%} | {controller:.2f} s | {share:.1%} |")  # fmt: skip
    print("\n| accelerators | rows | into the store | read by a node | of its link | spans | weights, 7B bf16 |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for accelerators, rows in SIZES:
        nodes = max(1, accelerators // PER_NODE)
        tokens = rows * (WORK.response_tokens + 256)
        stored = tokens * sum(TOKEN_BYTES.values())
        read = tokens * sum(TOKEN_BYTES[name] for name in TRAINED)
        link = read / NETWORK_BYTES_PER_SECOND if nodes > 1 else 0.0
        sync = 2 * WORK.parameters / NETWORK_BYTES_PER_SECOND
        cells = (
            f"{accelerators:,}", f"{rows:,}", f"{stored / 1e9:.2f} GB", f"{read / 1e9:.2f} GB", f"{link:.2f} s",
            f"{accelerators * SPAN_BYTES / 1e6:.2f} MB", f"{sync:.2f} s",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
