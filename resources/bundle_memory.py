"""What the roles of a bundle take of its memory together, and what that allows: a verdict for `callsheet plan`.

Pure: no Ray, no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.layout import placed, process_groups
from configs.model import ModelShape
from configs.pools import PoolConfig
from configs.run import RunConfig
from resources.batch_algebra import BatchAlgebra
from resources.memory import (
    ACCELERATOR_GIB,
    DEFAULT_CPU_KV_CACHE,
    DTYPE_BYTES,
    RoleMemory,
    duties_of_role,
    gib,
    kv_bytes_per_token,
    process_bytes,
)
from resources.node_resources import ACCELERATOR_MEMORY_LABEL, NodeResources
from resources.placement import NoFit, Placement


@dataclass(frozen=True, kw_only=True)
class BundleMemory:
    """What the roles of a bundle take together, beside what its accelerator has."""

    pool: str
    bundles: tuple[int, ...]
    """Bundles of the pool that look alike."""
    duties: tuple[str, ...]
    total: int
    certain: int
    capacity: int | None
    """None where the accelerator's memory is not known; the host's share for a pool of CPUs."""
    verdict: str
    """"fits", "over by estimate", "does not fit", or "unknown capacity"."""


def memory_of_bundles(
    config: RunConfig, placement: Placement | NoFit, memory: Mapping[str, RoleMemory]
) -> list[BundleMemory]:
    """One entry for bundles of a pool that hold the same processes on the same amount of memory."""
    alike: dict[tuple[str, tuple[tuple[str, ...], ...], int | None], list[int]] = {}
    for name, pool in config.pools.items():
        groups = [group for group in process_groups(config) if group.pool == name]
        for bundle in range(pool.size):
            inside = [group for group in groups for place in group.bundles if place == bundle]
            processes = tuple(
                tuple(duty for role in group.roles for duty in duties_of_role(role) if duty in memory)
                for group in inside
            )
            capacity = _capacity(config, placement, name, bundle)
            alike.setdefault((name, tuple(filter(None, processes)), capacity), []).append(bundle)
    found: list[BundleMemory] = []
    for (name, processes, capacity), bundles in alike.items():
        duties = tuple(duty for process in processes for duty in process)
        is_gpu = config.pools[name].accelerator != "none"
        total = sum(memory[duty].total for duty in duties)
        total += sum(process_bytes(config, process, is_gpu) for process in processes)
        certain = sum(memory[duty].certain for duty in duties if not _is_offloaded(config, duty))
        certain += asked_cache(config, name, duties)
        verdict = _verdict(total, certain, capacity)
        found.append(
            BundleMemory(
                pool=name, bundles=tuple(bundles), duties=duties, total=total, certain=certain, capacity=capacity,
                verdict=verdict,
            )
        )  # fmt: skip
    return [bundle for bundle in found if bundle.duties]


def asked_cache(config: RunConfig, pool: str, duties: Sequence[str]) -> int:
    """KV cache that a CPU engine takes whole when it starts; an accelerator's is what weights leave."""
    is_cpu_engine = "rollout" in duties and config.pools[pool].accelerator == "none"
    return (config.rollout.kv_cache_bytes or 0) if is_cpu_engine and config.rollout.engine == "vllm" else 0


def _is_offloaded(config: RunConfig, duty: str) -> bool:
    offloads = {"actor": config.actor.offload, "critic": config.critic.offload, "rollout": config.rollout.offload}
    return offloads.get(duty, False)


def _verdict(total: int, certain: int, capacity: int | None) -> str:
    if capacity is None:
        return "unknown capacity"
    if certain > capacity:
        return "does not fit"
    return "fits" if total <= capacity else "over by estimate"


def _capacity(config: RunConfig, placement: Placement | NoFit, pool: str, bundle: int) -> int | None:
    """Memory behind one bundle: its share of an accelerator; for CPUs what it reserves, else its share of the node."""
    shape = config.pools[pool]
    node = _node_of(placement, pool, bundle)
    if shape.accelerator == "none":
        if shape.memory_per_bundle is not None or node is None or "memory" not in node.total:
            return shape.memory_per_bundle
        assert isinstance(placement, Placement)
        beside = sum(
            1 for other in placement.pools.values() for place in other.bundles if place.node_id == node.node_id
        )
        return int(node.free["memory"] / beside)
    return accelerator_bytes(shape, node)


def accelerator_bytes(pool: PoolConfig, node: NodeResources | None) -> int | None:
    """Accelerator memory behind a bundle of the pool on this node; None where nobody tells."""
    if node is not None and ACCELERATOR_MEMORY_LABEL in node.labels:
        return int(int(node.labels[ACCELERATOR_MEMORY_LABEL]) * pool.accelerators_per_bundle)
    known = pool.accelerator_type or (node.accelerator_type if node is not None else None)
    size = ACCELERATOR_GIB.get(known or "")
    return None if size is None else int(size * 2**30 * pool.accelerators_per_bundle)


def least_accelerator_bytes(
    pools: Mapping[str, PoolConfig], nodes_of: Mapping[str, Sequence[NodeResources | None]]
) -> int:
    """Accelerator memory behind the smallest bundle; 0 without accelerators, or where one bundle's is not known.

    `nodes_of`: pool -> the node of each of its bundles.
    """
    found = [
        accelerator_bytes(pool, node)
        for name, pool in pools.items()
        if pool.accelerator != "none"
        for node in nodes_of[name]
    ]
    known = [size for size in found if size is not None]
    return min(known, default=0) if len(known) == len(found) else 0


def _node_of(placement: Placement | NoFit, pool: str, bundle: int) -> NodeResources | None:
    if isinstance(placement, NoFit):
        return None
    node_id = placement.pools[pool].bundles[bundle].node_id
    return next(node for node in placement.nodes if node.node_id == node_id)


def memory_remarks(
    config: RunConfig, shape: ModelShape, bundles: Sequence[BundleMemory], algebra: BatchAlgebra
) -> list[str]:
    """Bundles that estimates overfill, and engines that would pre-empt sequences."""
    remarks: list[str] = []
    for bundle in bundles:
        first, last = bundle.bundles[0], bundle.bundles[-1]
        where = f"pool {bundle.pool}, " + (f"bundle {first}" if first == last else f"bundles {first} to {last}")
        if bundle.verdict == "over by estimate":
            remarks.append(
                f"{where}: {', '.join(bundle.duties)} take about {gib(bundle.total)} at once and the bundle has "
                f"{gib(bundle.capacity or 0)}; lower micro-batches or rollout.max_running_sequences, checkpoint "
                "gradients, or offload roles while others work"
            )
        if (
            "rollout" in bundle.duties
            and bundle.capacity is not None
            and config.pools[bundle.pool].accelerator != "none"
        ):
            sequences = _room_of_kv_cache(config, shape, bundle.capacity) // _sequence_bytes(config, shape, algebra)
            wanted = min(config.rollout.max_running_sequences, algebra.rows_per_engine)
            if 0 < sequences < wanted:
                remarks.append(
                    f"{where}: rollout.gpu_memory_fraction {config.rollout.gpu_memory_fraction:g} leaves room for "
                    f"{sequences} whole sequences and up to {wanted} run at once; vLLM then pre-empts some"
                )
    return remarks


def cache_refusals(
    config: RunConfig, shape: ModelShape, bundles: Sequence[BundleMemory], algebra: BatchAlgebra
) -> list[str]:
    """vLLM starts only where its KV cache holds the longest sequence."""
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.num_gpu_blocks_override is not None:
        return []
    needed = _sequence_bytes(config, shape, algebra)
    longest = f"one sequence of {rollout.max_model_length or algebra.longest} tokens takes {needed} bytes"
    refusals: list[str] = []
    for bundle in bundles:
        if "rollout" not in bundle.duties:
            continue
        if config.pools[bundle.pool].accelerator == "none":
            cache = rollout.kv_cache_bytes or DEFAULT_CPU_KV_CACHE
            if cache < needed:
                refusals.append(f"rollout.kv_cache_bytes is {cache}; {longest}; raise it, or shorten sequences")
        elif bundle.capacity is not None and _room_of_kv_cache(config, shape, bundle.capacity) < needed:
            refusals.append(
                f"rollout.gpu_memory_fraction is {rollout.gpu_memory_fraction:g} of {gib(bundle.capacity)} in pool "
                f"{bundle.pool}; {longest} beside the weights; raise it, shorten sequences, or use tensor_parallel"
            )
    return refusals


def _sequence_bytes(config: RunConfig, shape: ModelShape, algebra: BatchAlgebra) -> int:
    """KV cache of one sequence as long as they may get, on one rank of an engine."""
    peers = placed(config, "rollout").tensor_parallel
    tokens = config.rollout.max_model_length or algebra.longest
    return tokens * kv_bytes_per_token(shape, config.rollout.dtype or config.model.dtype, peers)


def _room_of_kv_cache(config: RunConfig, shape: ModelShape, capacity: int) -> int:
    """What an engine's share of an accelerator has beside its weights."""
    dtype, peers = config.rollout.dtype or config.model.dtype, placed(config, "rollout").tensor_parallel
    weights = -(-shape.num_parameters * DTYPE_BYTES[dtype] // peers)
    return max(0, int(capacity * config.rollout.gpu_memory_fraction) - weights)
