"""When to colocate and when to split: the simulator over made-up but plausible runs, as a Markdown table.

`python -m resources.telemetry.study` prints the table of docs/colocate-or-split.md. Timings are a roofline of one
accelerator type, not measurements; the constants below are all there is to change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resources.telemetry.flops import PEAK_FLOPS
from resources.telemetry.profile import GraderProfile, RolloutProfile, RunProfile, TaskProfile
from resources.telemetry.search import search_topology
from resources.telemetry.topology import Topology, measured_topology
from resources.telemetry.whatif import Prediction

PEAK = PEAK_FLOPS["H100"]
TRAINING_UTILISATION = 0.35
SCORING_UTILISATION = 0.45
MEMORY_BYTES_PER_SECOND = 3.35e12 * 0.7
ACCELERATOR_BYTES = 80e9
HOST_LINK_BYTES_PER_SECOND = 25e9
NODE_LINK_BYTES_PER_SECOND = 200e9
"""Between accelerators of a node: the gather of a fused weight sync."""
NETWORK_BYTES_PER_SECOND = 50e9
"""Between nodes: a weight sync from pool to pool."""
STATE_BYTES_PER_PARAMETER = 16.0
"""bfloat16 weights and gradients, float32 weights and two Adam moments."""
PROMPTS, GROUP_SIZE, SLOTS = 128, 8, 256
COMMUNICATION_SHARE = 0.15
"""Collectives not hidden under computing, of a training task on 8 ranks."""
MICRO_BATCH_TOKENS = 16384
_MEASURED_RANKS = 8
_LAYER_BYTES = {0.5e9: 12e3, 7e9: 57e3, 32e9: 262e3}
"""KV-cache bytes a token (grouped-query attention, bfloat16), by parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One row of the table."""

    parameters: float
    response_tokens: int
    reward: str
    """rule, judge (2 s a call, 32 at once) or model (as large as the actor)."""
    accelerators: int
    num_nodes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Best step of each way; `split_async` is one iteration off-policy."""

    fused: Prediction | None
    split: Prediction | None
    split_async: Prediction | None


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(parameters=p, response_tokens=t, reward="rule", accelerators=n)
        for p in _LAYER_BYTES
        for t in (256, 2048, 8192)
        for n in (8, 64)
    ),
    *(
        Workload(parameters=7e9, response_tokens=t, reward=r, accelerators=n)
        for r in ("judge", "model")
        for t in (256, 2048)
        for n in (8, 64)
    ),
)


def synthetic_profile(work: Workload) -> RunProfile:
    """A profile as a run on 8 accelerators would have measured it, by roofline."""
    tensor_parallel = 2 if work.parameters > 20e9 else 1
    states, weights = _bytes(work)
    tasks = _tasks(work, tensor_parallel)
    roles = {task.role: "cpu" if task.role in ("advantage", "reward") else "main" for task in tasks.values()}
    if work.reward == "model":
        roles["reward"] = "main"
    return RunProfile(
        tasks=tasks,
        rollout=_rollout(work, tensor_parallel),
        grader=_grader(work, PROMPTS * GROUP_SIZE),
        pools={"main": _MEASURED_RANKS, "cpu": _MEASURED_RANKS},
        accelerator_pools=frozenset({"main"}),
        roles=roles,
        colocate={},
        cores=0.0,
        prompts_per_iteration=PROMPTS,
        group_size=GROUP_SIZE,
        accelerator_bytes=ACCELERATOR_BYTES,
        sync_seconds_split=0.5 + weights / NETWORK_BYTES_PER_SECOND,
        sync_seconds_fused=0.5 + weights / NODE_LINK_BYTES_PER_SECOND,
        switch_seconds=1.0
        + 2 * (states * _MEASURED_RANKS / work.accelerators + weights / tensor_parallel) / HOST_LINK_BYTES_PER_SECOND,
    )


def _tasks(work: Workload, tensor_parallel: int) -> dict[str, TaskProfile]:
    tokens = PROMPTS * GROUP_SIZE * work.response_tokens
    forward = 2.0 * work.parameters * tokens / (PEAK * SCORING_UTILISATION) / _MEASURED_RANKS
    states, weights = _bytes(work)
    optimizer = states / MEMORY_BYTES_PER_SECOND + 0.05
    update = 6.0 * work.parameters * tokens / (PEAK * TRAINING_UTILISATION) / _MEASURED_RANKS + optimizer
    trained, frozen = states + 10e9, weights / _MEASURED_RANKS
    scored = forward if work.reward == "model" else 0.0  # of graders, `_grader` tells all
    before = ("reference", "actor-log-probs", "critic-values", "reward")
    # task, role, upstream, seconds of a rank, of them fixed, bytes of a rank
    graph = (
        ("reference", "reference", ("rollout",), forward, 0.0, frozen),
        ("actor-log-probs", "actor", ("rollout",), forward, 0.0, trained),
        ("critic-values", "critic", ("rollout",), forward, 0.0, trained),
        ("reward", "reward", ("rollout",), scored, 0.0, frozen),
        ("advantage", "advantage", before, 0.1, 0.1, 0.0),
        ("critic-update", "critic", ("advantage",), update, optimizer, trained),
        ("actor-update", "actor", ("advantage",), update, optimizer, trained),
        ("weight-sync", "actor", ("actor-update", "critic-update"), 1.0, 1.0, 0.0),
    )
    engine = weights / tensor_parallel + 12e9
    rollout = TaskProfile(
        task="rollout", role="rollout", upstream=(), num_ranks=_MEASURED_RANKS, seconds=(1.0,), memory_bytes=engine
    )
    tasks = {"rollout": rollout}
    for name, role, upstream, seconds, fixed, memory in graph:
        tasks[name] = TaskProfile(
            task=name,
            role=role,
            upstream=upstream,
            num_ranks=_MEASURED_RANKS,
            seconds=(seconds,),
            fixed_seconds=fixed,
            communication_seconds=COMMUNICATION_SHARE * (seconds - fixed) if role in ("actor", "critic") else 0.0,
            micro_batches=max(1.0, tokens / _MEASURED_RANKS / MICRO_BATCH_TOKENS),
            overhead_seconds=0.02,
            memory_bytes=memory,
        )
    return tasks


def _bytes(work: Workload) -> tuple[float, float]:
    """(training states of a rank, weights of a whole copy)."""
    return STATE_BYTES_PER_PARAMETER * work.parameters / _MEASURED_RANKS, 2.0 * work.parameters


def _rollout(work: Workload, tensor_parallel: int) -> RolloutProfile:
    """Log-normal lengths (sigma 0.6), cut at four times the mean; a step reads the weights, a token its KV cache."""
    edges = [max(1, round(work.response_tokens * x / 8)) for x in range(1, 33)]
    sigma = 0.6
    centre = math.log(work.response_tokens) - sigma**2 / 2
    shares = [math.exp(-((math.log(edge * 1.06) - centre) ** 2) / (2 * sigma**2)) / edge for edge in edges]
    cache = _LAYER_BYTES[work.parameters] * work.response_tokens / 2
    return RolloutProfile(
        num_engines=_MEASURED_RANKS // tensor_parallel,
        tensor_parallel=tensor_parallel,
        step_seconds=0.004 + 2.0 * work.parameters / tensor_parallel / MEMORY_BYTES_PER_SECOND,
        token_seconds=(2.0 * work.parameters / (PEAK * SCORING_UTILISATION) + cache / MEMORY_BYTES_PER_SECOND)
        / tensor_parallel,
        overhead_seconds=0.5,
        slots=SLOTS,
        length_edges=(*edges, edges[-1]),
        length_weights=tuple(s / sum(shares) for s in shares),
    )


def _grader(work: Workload, rows: int) -> GraderProfile | None:
    if work.reward == "judge":
        return GraderProfile(total_seconds=rows * 2.0, max_seconds=4.0, workers=32, is_streamed=True)
    if work.reward == "rule":
        return GraderProfile(total_seconds=rows * 0.005, max_seconds=0.02, workers=16, is_streamed=True)
    return None


def compare(work: Workload) -> Answer:
    """The best fused layout, the best one with the rollout apart, and the best of those one iteration off-policy."""
    profile = synthetic_profile(work)
    base = replace(measured_topology(profile), tensor_parallel=2 if work.parameters > 20e9 else 1)

    def rollout_apart(parts: Sequence[Sequence[str]]) -> bool:
        return not any("rollout" in part and "actor" in part for part in parts)

    def best(depth: int, *, is_split: bool) -> Prediction | None:
        try:
            found = search_topology(
                profile, work.accelerators, base=replace(base, async_depth=depth), max_async_depth=depth,
                allowed=rollout_apart if is_split else lambda parts: len(parts) == 1, limit_seconds=60.0,
            )  # fmt: skip
        except ValueError:  # nothing fits: the row says so
            return None
        return found.best

    return Answer(fused=best(0, is_split=False), split=best(0, is_split=True), split_async=best(1, is_split=True))


def table(workloads: Sequence[Workload] = WORKLOADS) -> str:
    """The Markdown table."""
    lines = [
        "| model | response tokens | reward | accelerators | fused s | split s | split, async_depth 1 s"
        " | best on-policy | best split |",
        "|--:|--:|---|--:|--:|--:|--:|---|---|",
    ]
    for work in workloads:
        answer = compare(work)
        steps = [
            f"{found.step_seconds:.1f}" if found is not None else "does not fit"
            for found in (answer.fused, answer.split, answer.split_async)
        ]
        cells = (
            f"{work.parameters / 1e9:g}B",
            str(work.response_tokens),
            work.reward,
            str(work.accelerators),
            *steps,
            _winner(answer),
            _sizes(answer),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _winner(answer: Answer) -> str:
    if answer.fused is None or answer.split is None:
        return "neither" if answer.fused is answer.split else "split" if answer.fused is None else "fused"
    ratio = answer.split.step_seconds / answer.fused.step_seconds
    if abs(ratio - 1) < 0.05:
        return "either"
    return f"fused, {100 * (1 - 1 / ratio):.0f} %" if ratio > 1 else f"split, {100 * (1 - ratio):.0f} %"


def _sizes(answer: Answer) -> str:
    """Pools of the faster split layout, accelerators only."""
    found = [prediction for prediction in (answer.split_async, answer.split) if prediction is not None]
    if not found:
        return ""
    topology: Topology = min(found, key=lambda prediction: prediction.step_seconds).topology
    return ", ".join(f"{name} {ranks}" for name, ranks in topology.pools.items() if name in topology.accelerator_pools)


if __name__ == "__main__":
    print(table(), end="")
