"""The call sheet: who works where, how the rows divide, what it takes. Everything known before anything starts.

Pure: no Ray, no torch. `callsheet plan` prints it and `train` reserves by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.address_rules import named_code
from configs.layout import process_groups
from configs.model import ModelShape
from configs.parallel_rules import shape_problems
from configs.problems import ConfigError
from configs.run import RunConfig
from configs.unread import unread_notes
from resources.batch_algebra import BatchAlgebra, batch_algebra
from resources.bundle_memory import BundleMemory, asked_cache, cache_refusals, memory_of_bundles, memory_remarks
from resources.local_cluster import local_cpus, shared_cores_note
from resources.memory import ACCELERATOR_GIB, RoleMemory, gib, memory_of_duties, models_of
from resources.model_shapes import position_problems, shape_contradictions, shape_of
from resources.node_resources import NodeResources, this_machine
from resources.placement import NoFit, Placement, fit
from resources.row_counts import planned_shortages
from resources.weight_files import damaged_models, weightless_notes


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
        cache = asked_cache(self.config, bundle.pool, bundle.duties)
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
    bundles = tuple(memory_of_bundles(config, placement, memory))
    note = shared_cores_note(config) if any(node.node_id == "this-machine" for node in nodes) else None
    remarks = [
        *([] if note is None else [note]),
        *unread_notes(config),
        *_left_to_the_start(config),
        *_idle_bundles(config),
        *algebra.remarks,
        *memory_remarks(config, shapes["model"], bundles, algebra),
    ]
    return Plan(
        config=config,
        placement=placement,
        algebra=algebra,
        memory=memory,
        bundles=bundles,
        shapes=shapes,
        remarks=tuple(remarks),
        engine_refusals=tuple(cache_refusals(config, shapes["model"], bundles, algebra)),
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
