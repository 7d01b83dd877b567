"""The call sheet: who works where, how the rows divide, what it takes. Everything known before anything starts.

Pure: no Ray, no torch. `callsheet plan` prints it and `train` reserves by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.content_rules import named_code
from configs.layout import placed, process_groups
from configs.model import ModelShape
from configs.parallel_rules import shape_problems
from configs.problems import ConfigError
from configs.run import RunConfig
from configs.unread import unread_notes
from resources.batch_algebra import BatchAlgebra, batch_algebra
from resources.local_cluster import local_cpus, shared_cores_note
from resources.memory import (
    ACCELERATOR_GIB,
    DEFAULT_CPU_KV_CACHE,
    DTYPE_BYTES,
    RoleMemory,
    duties_of_role,
    kv_bytes_per_token,
    memory_of_duties,
    models_of,
    process_bytes,
)
from resources.model_shapes import position_problems, shape_contradictions, shape_of
from resources.node_resources import ACCELERATOR_MEMORY_LABEL, NodeResources, this_machine
from resources.placement import NoFit, Placement, fit
from resources.row_counts import planned_shortages
from resources.weight_files import damaged_models, weightless_notes


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole call sheet."""

    config: RunConfig
    placement: Placement | NoFit
    algebra: BatchAlgebra
    memory: Mapping[str, RoleMemory]
    bundles: tuple[BundleMemory, ...]
    shapes: Mapping[str, ModelShape]
    remarks: tuple[str, ...]
    engine_refusals: tuple[str, ...] = ()
    """Why the rollout engine would not start."""

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why this plan cannot work; empty when it can."""
        reasons = [str(self.placement)] if isinstance(self.placement, NoFit) else []
        for bundle in self.bundles:
            if bundle.verdict == "does not fit":
                reasons.append(self._too_large(bundle))
        return (*reasons, *self.engine_refusals)

    def _too_large(self, bundle: BundleMemory) -> str:
        cache = _asked_cache(self.config, bundle.pool, bundle.duties)
        ways = ["more bundles", "fewer roles in the pool", "bfloat16", "LoRA", "offload"]
        ways += ["a smaller rollout.kv_cache_bytes"] if cache else []
        return (
            f"pool {bundle.pool}: weights, gradients and optimizer states of {', '.join(bundle.duties)}"
            f"{', and the KV cache that rollout.kv_cache_bytes asks for,' if cache else ''} take {gib(bundle.certain)} "
            f"of each bundle, which has {gib(bundle.capacity or 0)}; use {', '.join(ways[:-1])}, or {ways[-1]}"
        )

    @property
    def unchecked_memory(self) -> str | None:
        """Which pools nobody knows the memory of, and how to say it; None where all are known."""
        if isinstance(self.placement, NoFit):
            return None
        unknown = dict.fromkeys(bundle.pool for bundle in self.bundles if bundle.capacity is None)
        on_cpus = [pool for pool in unknown if self.config.pools[pool].accelerator == "none"]
        on_accelerators = [pool for pool in unknown if pool not in on_cpus]
        said: list[str] = []
        if on_accelerators:
            said.append(
                f"the accelerator memory of {', '.join(on_accelerators)} was not checked, since nothing tells how much "
                'an accelerator has; name it with vram in --nodes, for example --nodes "1x(gpu=8,cpu=96,vram=80GiB)", '
                f"or name the type, in --nodes or as pools.{on_accelerators[0]}.accelerator_type: "
                + ", ".join(ACCELERATOR_GIB)
            )
        if on_cpus:
            said.append(
                f"the memory of {', '.join(on_cpus)} was not checked, since nothing tells how much a node has; name it "
                f"with mem in --nodes, or as pools.{on_cpus[0]}.memory_per_bundle"
            )
        return "; ".join(said) or None

    @property
    def doubtful_memory(self) -> str | None:
        """Which pools the estimate overfills, and how to say it; None where it overfills none."""
        over = dict.fromkeys(bundle.pool for bundle in self.bundles if bundle.verdict == "over by estimate")
        return f"by estimate the memory of {', '.join(over)} does not suffice; see the notes" if over else None

    @property
    def absent_weights(self) -> str | None:
        """Which models have no weights yet, and how to say it; None where all have, as far as can be told here."""
        return "; ".join(weightless_notes(self.config)) or None

    @property
    def does_fit(self) -> bool:
        """Whether the run may start."""
        return not self.refusals

    def as_json(self) -> dict[str, Any]:
        """One plain object, for programs."""
        placement = self.placement
        body: dict[str, Any] = {
            "name": self.config.name,
            "fits": self.does_fit,
            "refusals": list(self.refusals),
            "remarks": list(self.remarks),
            "unchecked_memory": self.unchecked_memory,
            "doubtful_memory": self.doubtful_memory,
            "absent_weights": self.absent_weights,
            "batch": asdict(self.algebra),
            "memory": {duty: asdict(memory) | {"total": memory.total} for duty, memory in self.memory.items()},
            "bundles": [asdict(bundle) for bundle in self.bundles],
            "parameters": {path: shape.num_parameters for path, shape in self.shapes.items()},
        }
        if isinstance(placement, Placement):
            body["nodes"] = [
                {
                    "ip": node.ip,
                    "node_id": node.node_id,
                    "total": dict(node.total),
                    "left": dict(placement.left[node.node_id]),
                }
                for node in placement.nodes
            ]
            body["pins"] = placement.pins()
            body["ranks"] = [asdict(rank) for rank in placement.ranks]
            body["others"] = [asdict(other) for other in placement.others]
        else:
            body["no_fit"] = asdict(placement)
        return body


def gib(amount: int) -> str:
    """Bytes as a person reads them: "1.50 GiB", "12.3 MiB"."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def local_nodes(config: RunConfig) -> tuple[NodeResources, ...]:
    """This machine, with the logical CPUs that a local cluster would be started with: what the pools ask, at least."""
    return (this_machine(num_cpus=local_cpus(config), num_gpus=config.ray.num_gpus),)


def build_plan(config: RunConfig, nodes: Sequence[NodeResources]) -> Plan:
    """Work out everything.

    Raises:
        ConfigError: a model of which neither the config nor a local config.json tells the shape, whose heads no rank
            or engine of this config can take, that has too few positions, or whose files of weights are damaged; too
            few rows for an iteration.
    """
    models = models_of(config)
    shapes = {path: shape_of(path, model) for path, model in models.items()}
    read = {path: shape for path, shape in shapes.items() if path == "model" and models[path].shape is None}
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    problems = [
        *shape_contradictions(models), *position_problems(read, longest), *shape_problems(config, shapes),
        *planned_shortages(config), *damaged_models(config),
    ]  # fmt: skip
    if problems:
        raise ConfigError(config.name, problems)
    placement = fit(config, nodes)
    memory = memory_of_duties(config, shapes)
    algebra = batch_algebra(config)
    bundles = tuple(_bundle_memory(config, placement, memory))
    note = shared_cores_note(config) if any(node.node_id == "this-machine" for node in nodes) else None
    remarks = [
        *([] if note is None else [note]),
        *unread_notes(config),
        *_left_to_the_start(config),
        *_idle_bundles(config),
        *algebra.remarks,
        *_memory_remarks(config, shapes["model"], bundles, algebra),
    ]
    return Plan(
        config=config,
        placement=placement,
        algebra=algebra,
        memory=memory,
        bundles=bundles,
        shapes=shapes,
        remarks=tuple(remarks),
        engine_refusals=tuple(_engine_refusals(config, shapes["model"], bundles, algebra)),
    )


def _left_to_the_start(config: RunConfig) -> Iterator[str]:
    """What only the machine that starts the run can look at; a plan may be made elsewhere."""
    named = [*named_code(config), *(["code.import_paths"] if config.code.import_paths else [])]
    named += ["model.tokenizer_path"] if config.model.tokenizer_path is not None else []
    if named:
        yield f"what these keys name is looked at when a run starts, and was not here: {', '.join(named)}"


def _idle_bundles(config: RunConfig) -> Iterator[str]:
    """Pools that are larger than what their roles' workers fill."""
    groups = process_groups(config)
    for name, pool in config.pools.items():
        used = {bundle for group in groups if group.pool == name for bundle in group.bundles}
        if len(used) < pool.size:
            roles = ", ".join(
                f"roles.{role}.workers"
                for group in groups
                if group.pool == name
                for role in group.roles
                if role in config.roles
            )
            yield f"pool {name} has {pool.size} bundles and processes on {len(used)} of them; see {roles}"


def _bundle_memory(
    config: RunConfig, placement: Placement | NoFit, memory: Mapping[str, RoleMemory]
) -> list[BundleMemory]:
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
        certain += _asked_cache(config, name, duties)
        verdict = _verdict(total, certain, capacity)
        found.append(
            BundleMemory(
                pool=name, bundles=tuple(bundles), duties=duties, total=total, certain=certain, capacity=capacity,
                verdict=verdict,
            )
        )  # fmt: skip
    return [bundle for bundle in found if bundle.duties]


def _asked_cache(config: RunConfig, pool: str, duties: Sequence[str]) -> int:
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
    if node is not None and ACCELERATOR_MEMORY_LABEL in node.labels:
        return int(int(node.labels[ACCELERATOR_MEMORY_LABEL]) * shape.accelerators_per_bundle)
    known = shape.accelerator_type or (node.accelerator_type if node is not None else None)
    size = ACCELERATOR_GIB.get(known or "")
    return None if size is None else int(size * 2**30 * shape.accelerators_per_bundle)


def _node_of(placement: Placement | NoFit, pool: str, bundle: int) -> NodeResources | None:
    if isinstance(placement, NoFit):
        return None
    node_id = placement.pools[pool].bundles[bundle].node_id
    return next(node for node in placement.nodes if node.node_id == node_id)


def _memory_remarks(
    config: RunConfig, shape: ModelShape, bundles: Sequence[BundleMemory], algebra: BatchAlgebra
) -> list[str]:
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


def _engine_refusals(
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
