"""Resource pools: ordered bundles that roles are cast onto, and the ledger of what each bundle still has to give."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup

from configs.pools import PoolConfig
from resources.node_resources import bundle_demand
from resources.placement_groups import GroupRequest, PoolError
from resources.ranks import BundlePlace, RankPlace, assign_ranks, place_key

GRANULARITY = 1e-4
"""Ray counts resources in steps of one ten-thousandth."""
NODE_PIN = 0.001
"""Share of the resource `node:<ip>` that pins a placement group to a node."""


def round_down(amount: float) -> float:
    """To Ray's granularity: a third is 0.3333."""
    return math.floor(amount / GRANULARITY + 1e-6) * GRANULARITY


def group_requests(run_id: str, name: str, config: PoolConfig, pins: Sequence[tuple[str, str]]) -> list[GroupRequest]:
    """The placement groups of a pool. `pins` are (node ip, node id), one per entry of `nodes`."""
    bundle = bundle_demand(config)
    is_detached = config.lifetime == "detached"
    if config.nodes is None:
        whole = tuple(bundle for _ in range(config.size))
        return [
            GroupRequest(
                name=f"callsheet/{run_id}/{name}/0",
                label=f"pool {name}",
                bundles=whole,
                strategy=config.strategy,
                accelerator_type=config.accelerator_type,
                is_detached=is_detached,
            )
        ]
    requests: list[GroupRequest] = []
    for index, (size, (node_ip, node_id)) in enumerate(zip(config.nodes, pins, strict=True)):
        first = {**bundle, f"node:{node_ip}": NODE_PIN}
        requests.append(
            GroupRequest(
                name=f"callsheet/{run_id}/{name}/{index}",
                label=f"pool {name}, nodes[{index}]",
                bundles=(first, *(bundle for _ in range(size - 1))),
                strategy="STRICT_PACK",
                node_id=node_id,
                is_detached=is_detached,
            )
        )
    return requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What one worker group takes of a bundle, all its processes there together."""

    fraction: float
    cpus: float

    def times(self, processes: int) -> "Claim":
        """Of that many processes."""
        return Claim(fraction=self.fraction * processes, cpus=self.cpus * processes)


@dataclass(eq=False, kw_only=True)
class Bundle:
    """One bundle: where it landed, and who works on it. Sub-pools and merged pools share the object."""

    group: PlacementGroup
    place: BundlePlace
    pool: str
    config: PoolConfig
    claims: dict[str, Claim] = field(default_factory=dict)

    def check(self, owner: str, claim: Claim) -> None:
        """Raise PoolError when the claim does not fit beside those already there."""
        where = f"pool {self.pool}, node {self.place.node_ip}, bundle {self.place.bundle_index}"
        taken = (
            ", ".join(f"{name} {held.fraction:g} and {held.cpus:g} CPUs" for name, held in self.claims.items())
            or "nobody"
        )
        if len(self.claims) >= self.config.colocated_groups:
            raise PoolError(
                f"{where}: {owner} would be group {len(self.claims) + 1} on a bundle with colocated_groups "
                f"{self.config.colocated_groups} (there: {taken}); "
                f"raise pools.{self.pool}.colocated_groups or cast the role onto another pool"
            )
        fraction_left = 1.0 - sum(held.fraction for held in self.claims.values())
        if claim.fraction > fraction_left + GRANULARITY:
            raise PoolError(
                f"{where}: {owner} asks for fraction {claim.fraction:g} and {max(0.0, fraction_left):g} is left "
                f"(there: {taken}); the fractions on a bundle add up to at most 1"
            )
        cpus_left = self.config.cpus_per_bundle - sum(held.cpus for held in self.claims.values())
        if claim.cpus > cpus_left + GRANULARITY:
            raise PoolError(
                f"{where}: {owner} asks for {claim.cpus:g} CPUs and {max(0.0, cpus_left):g} of "
                f"{self.config.cpus_per_bundle:g} are left (there: {taken}); "
                f"raise pools.{self.pool}.cpus_per_bundle or lower roles.*.cpus"
            )


class ResourcePool:
    """Bundles in rank order: numeric node IP, then node id, then placement group, then bundle."""

    def __init__(self, name: str, config: PoolConfig, bundles: Sequence[Bundle]) -> None:
        self.name = name
        self.config = config
        self.bundles = sorted(bundles, key=lambda bundle: place_key(bundle.place))

    @property
    def size(self) -> int:
        """Number of bundles."""
        return len(self.bundles)

    @property
    def node_counts(self) -> list[int]:
        """Bundles on each node, in order."""
        return [
            len(list(group)) for _, group in itertools.groupby(self.bundles, key=lambda bundle: bundle.place.node_id)
        ]

    def ranks(self, bundles: Sequence[int] | None = None) -> list[RankPlace]:
        """A rank per bundle, or per entry of `bundles` (rank -> bundle of this pool, in non-decreasing order)."""
        chosen = range(self.size) if bundles is None else bundles
        return assign_ranks([self.bundles[index].place for index in chosen])

    def split(self, sizes: Mapping[str, int] | Sequence[int]) -> list["ResourcePool"]:
        """Cut into consecutive sub-pools, named or numbered.

        A sub-pool lies inside one node or begins and ends at node edges. Raises PoolError otherwise, or when the sizes
        do not add up.
        """
        named = (
            dict(sizes)
            if isinstance(sizes, Mapping)
            else {f"{self.name}.{index}": size for index, size in enumerate(sizes)}
        )
        if any(size < 1 for size in named.values()) or sum(named.values()) != self.size:
            raise PoolError(
                f"pool {self.name} has {self.size} bundles and cannot be split into {named}; "
                "sizes are positive and add up to it"
            )
        edges = {0, *itertools.accumulate(self.node_counts)}
        parts: list[ResourcePool] = []
        start = 0
        for name, size in named.items():
            stop = start + size
            part = ResourcePool(name, self.config, self.bundles[start:stop])
            if len(part.node_counts) > 1 and not {start, stop} <= edges:
                raise PoolError(
                    f"pool {self.name} with {self.node_counts} bundles per node cannot be split into {named}: {name} "
                    f"would hold bundles {start} to {stop - 1}, across a node edge; "
                    f"cut at {sorted(edges)} or inside one node"
                )
            parts.append(part)
            start = stop
        return parts

    @staticmethod
    def merge(name: str, pools: Sequence["ResourcePool"]) -> "ResourcePool":
        """One pool of all bundles; ranks on a node stay contiguous. Raises PoolError for pools that differ in kind."""
        kinds = {pool.name: bundle_demand(pool.config) for pool in pools}
        if len({tuple(sorted(kind.items())) for kind in kinds.values()}) != 1:
            raise PoolError(f"pools {sorted(kinds)} have different bundles and cannot be merged: {kinds}")
        bundles = [bundle for pool in pools for bundle in pool.bundles]
        if len({id(bundle) for bundle in bundles}) != len(bundles):
            raise PoolError(f"pools {sorted(kinds)} share bundles and cannot be merged; a bundle stands once in a pool")
        return ResourcePool(name, pools[0].config, bundles)

    def claim(self, owner: str, claim: Claim, bundles: Sequence[int] | None = None) -> None:
        """Enter a worker group on its bundles, or on none: `claim` per process, one per entry of `bundles`.

        Raises PoolError when it does not fit.
        """
        counts = Counter(range(self.size) if bundles is None else bundles)
        for index, processes in counts.items():
            self.bundles[index].check(owner, claim.times(processes))
        for index, processes in counts.items():
            self.bundles[index].claims[owner] = claim.times(processes)

    def give_back(self, owner: str) -> None:
        """Strike a worker group out."""
        for bundle in self.bundles:
            bundle.claims.pop(owner, None)


def build_pool(
    name: str, config: PoolConfig, groups: Sequence[PlacementGroup], node_ips: Mapping[str, str]
) -> ResourcePool:
    """The pool of placement groups that stand; node and local ranks follow from where the bundles landed."""
    bundles: list[Bundle] = []
    for group_index, group in enumerate(groups):
        for bundle_index, node_id in placement_group_table(group)["bundles_to_node_id"].items():
            place = BundlePlace(
                node_ip=node_ips[node_id], node_id=node_id, group_index=group_index, bundle_index=int(bundle_index)
            )
            bundles.append(Bundle(group=group, place=place, pool=name, config=config))
    return ResourcePool(name, config, bundles)
