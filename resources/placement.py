"""Fits every pool onto the nodes, one by one, before anything is reserved. Pure: no Ray, no torch.

`fit` answers with a Placement (role -> pool -> node -> bundle -> rank, and the node each entry is pinned to) or with
a NoFit, whose table says what is wanted, what is free on each node and who holds the rest. The answer depends on
nothing but config and nodes: neither on the order in which nodes are listed nor on that of the pools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.layout import HYBRID_ROLES, ProcessGroup, process_groups
from configs.run import RunConfig
from resources.node_fitting import Entry, Fitting, Shortage, fit_entries, pool_entries
from resources.node_resources import NodeResources
from resources.ranks import BundlePlace, RankPlace, assign_ranks, device_env, memory_env, node_key, place_key, rank_env
from resources.tensor_peers import peers_apart

MASTER_PORT_LATER = "(chosen at start)"
"""Rank 0 listens on a port that is free when it starts; no plan can know it."""


@dataclass(frozen=True, kw_only=True)
class PlacedRank:
    """One process of a worker group: where it works, beside whom, and with which environment."""

    group: str
    roles: tuple[str, ...]
    pool: str
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    node_ip: str
    node_id: str
    bundle: int
    """Of the pool, in the pool's order."""
    cpus: float
    accelerators: float
    neighbours: tuple[str, ...]
    """The other worker groups with a process in this bundle."""
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class OtherProcess:
    """A process that reserves nothing of its own but is there: task hosts, grader processes, the controller."""

    name: str
    where: str
    count: int
    note: str


@dataclass(frozen=True, kw_only=True)
class PoolPlacement:
    """Where the bundles of a pool land, in the pool's order."""

    pool: str
    bundles: tuple[BundlePlace, ...]
    pins: tuple[str, ...]
    """Node id for each entry of `nodes`; empty for a pool of the `bundles` form, which Ray spreads itself."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A plan that fits."""

    nodes: tuple[NodeResources, ...]
    pools: Mapping[str, PoolPlacement]
    ranks: tuple[PlacedRank, ...]
    others: tuple[OtherProcess, ...]
    left: Mapping[str, Mapping[str, float]]
    """Node id -> what stays free there."""

    def pins(self) -> dict[str, list[str]]:
        """Pool -> node id per entry of `nodes`, for the pool manager."""
        return {name: list(pool.pins) for name, pool in self.pools.items() if pool.pins}


@dataclass(frozen=True, kw_only=True)
class NoFit:
    """A plan that does not fit: which bundle, what it wants, and what each node has."""

    pool: str
    roles: tuple[str, ...]
    label: str
    """Which bundles: "nodes[1], 8 bundles on one node" or "bundle 3 of 12"."""
    wanted: Mapping[str, float]
    nodes: tuple["NodeRow", ...]
    reason: str

    def __str__(self) -> str:
        head = f"pool {self.pool} ({', '.join(self.roles)}), {self.label}, does not fit: {self.reason}"
        wanted = ", ".join(amount_text(name, amount) for name, amount in self.wanted.items())
        lines = [head, f"  wanted on one node: {wanted}"]
        for row in self.nodes:
            cells = ", ".join(
                f"{amount_text(name, free)} free of {size(name, row.total[name])}" for name, free in row.free.items()
            )
            held = "; ".join(
                f"{who} holds " + ", ".join(amount_text(name, amount) for name, amount in amounts.items())
                for who, amounts in row.holders.items()
            )
            lines.append(f"  {row.ip} ({row.node_id[:12]}): {cells}; {held or 'nobody holds any'}{row.remark}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node in the table of a NoFit."""

    ip: str
    node_id: str
    free: Mapping[str, float]
    """After what this run's other pools take there."""
    total: Mapping[str, float]
    holders: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    remark: str = ""


def size(name: str, amount: float) -> str:
    """An amount as a person writes it: memory in GiB, counts without a trailing zero."""
    return f"{amount / 2**30:.4g} GiB" if name == "memory" else f"{amount:g}"


def amount_text(name: str, amount: float) -> str:
    """ "8 GPU", "900 GiB memory"."""
    return f"{size(name, amount)} {name}"


def fit(config: RunConfig, nodes: Sequence[NodeResources]) -> Placement | NoFit:
    """Place every bundle and every process of `config` on `nodes`, or say what does not fit and why."""
    ordered = tuple(sorted(nodes, key=lambda node: node_key(node.ip, node.node_id)))
    fitting = fit_entries([one for name, pool in config.pools.items() for one in pool_entries(name, pool)], ordered)
    if isinstance(fitting, Shortage):
        return _no_fit(config, fitting)
    pools = {name: _pool_placement(config, name, fitting) for name in config.pools}
    for group in process_groups(config):
        problem = peers_apart(config, group, _rank_places(group, pools[group.pool]))
        if problem is not None:
            return _peers_do_not_fit(config, group, problem, fitting, ordered)
    return Placement(
        nodes=ordered,
        pools=pools,
        ranks=tuple(
            rank for group in process_groups(config) for rank in _placed_ranks(config, group, pools[group.pool])
        ),
        others=_others(config, pools),
        left=fitting.left,
    )


def _pool_placement(config: RunConfig, name: str, fitting: Fitting) -> PoolPlacement:
    places: list[BundlePlace] = []
    pins: list[str] = []
    for entry, landed in fitting.landed:
        if entry.pool != name:
            continue
        if entry.strategy is None:
            pins.append(landed[0].node_id)
        places += [
            BundlePlace(node_ip=node.ip, node_id=node.node_id, group_index=entry.index, bundle_index=index)
            for index, node in enumerate(landed)
        ]
    return PoolPlacement(pool=name, bundles=tuple(sorted(places, key=place_key)), pins=tuple(pins))


def _rank_places(group: ProcessGroup, pool: PoolPlacement) -> list[RankPlace]:
    return assign_ranks([pool.bundles[bundle] for bundle in group.bundles])


def _placed_ranks(config: RunConfig, group: ProcessGroup, pool: PoolPlacement) -> list[PlacedRank]:
    places = _rank_places(group, pool)
    others = [other for other in process_groups(config) if other.pool == group.pool and other.name != group.name]
    threads = str(group.threads)
    user_env = {
        key: value for role in group.roles if role in config.roles for key, value in config.roles[role].env.items()
    }
    ranks: list[PlacedRank] = []
    for place, bundle in zip(places, group.bundles, strict=True):
        env = rank_env(place, group.name, None)
        env |= {"MASTER_ADDR": places[0].node_ip, "MASTER_PORT": MASTER_PORT_LATER}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        env |= {**memory_env(group.accelerators), **device_env(group.accelerators)}
        ranks.append(
            PlacedRank(
                group=group.name,
                roles=group.roles,
                pool=group.pool,
                rank=place.rank,
                world_size=place.world_size,
                local_rank=place.local_rank,
                node_rank=place.node_rank,
                node_ip=place.node_ip,
                node_id=place.node_id,
                bundle=bundle,
                cpus=group.cpus,
                accelerators=group.accelerators,
                neighbours=tuple(other.name for other in others if bundle in other.bundles),
                env=env | user_env,
            )
        )
    return ranks


def _others(config: RunConfig, pools: Mapping[str, PoolPlacement]) -> tuple[OtherProcess, ...]:
    others = [
        OtherProcess(
            name="controller", where="the machine that runs callsheet", count=1, note="the flow, and Ray's driver"
        ),
        OtherProcess(
            name="Prefect server",
            where=config.prefect.api_url or "the controller's machine",
            count=0 if config.prefect.api_url else 1,
            note="a running one is used" if config.prefect.api_url else "started on loopback, SQLite",
        ),
    ]
    for name, pool in pools.items():
        where = f"pool {name}, bundle 0 on {pool.bundles[0].node_ip}"
        others.append(OtherProcess(name="task host", where=where, count=1, note="0 CPUs; drives the pool's workers"))
    for group in process_groups(config):
        if "reward" in group.roles:
            graders = config.reward.processes * group.workers
            where = f"pool {group.pool}, beside the reward workers"
            note = f"{config.reward.processes} a reward worker, on its CPUs"
            others.append(OtherProcess(name="grader processes", where=where, count=graders, note=note))
        if "rollout" in _duties_of(group):
            note = "engines run inside the rollout workers; no child process of theirs reserves anything"
            others.append(OtherProcess(name="engine children", where=f"pool {group.pool}", count=0, note=note))
    return tuple(others)


def _duties_of(group: ProcessGroup) -> set[str]:
    return {duty for role in group.roles for duty in HYBRID_ROLES.get(role, (role,))}


def _no_fit(config: RunConfig, shortage: Shortage) -> NoFit:
    entry = shortage.entry
    if entry.strategy is None:
        label = f"nodes[{entry.index}], {entry.count} bundles on one node"
        wanted = {name: amount * entry.count for name, amount in entry.demand.items()}
    else:
        label = f"bundle {shortage.bundle} of {entry.count}"
        wanted = dict(entry.demand)
    names = list(wanted)
    rows = tuple(
        NodeRow(
            ip=node.ip,
            node_id=node.node_id,
            free={name: shortage.left[node.node_id].get(name, 0.0) for name in names},
            total={name: node.total.get(name, 0.0) for name in names},
            holders=_holders(node, shortage, names),
            remark=_remark(node, entry, shortage),
        )
        for node in shortage.nodes
    )
    roles = tuple(role for role, where in config.roles.items() if where.pool == entry.pool)
    return NoFit(
        pool=entry.pool, roles=roles, label=label, wanted=wanted, nodes=rows, reason=_reason(entry, wanted, shortage)
    )


def _peers_do_not_fit(
    config: RunConfig, group: ProcessGroup, problem: str, fitting: Fitting, nodes: tuple[NodeResources, ...]
) -> NoFit:
    """Every bundle has a node, and tensor-parallel peers do not share theirs."""
    entry = next(entry for entry, _ in fitting.landed if entry.pool == group.pool)
    shortage = Shortage(entry=entry, bundle=0, nodes=nodes, left=fitting.left, landed=fitting.landed)
    peers = max(config.roles[role].tensor_parallel for role in group.roles)
    wanted = {name: amount * peers for name, amount in entry.demand.items()}
    label = f"{peers} bundles of tensor-parallel peers"
    return replace(_no_fit(config, shortage), label=label, wanted=wanted, reason=problem)


def _holders(node: NodeResources, shortage: Shortage, names: Sequence[str]) -> dict[str, dict[str, float]]:
    held = {who: {name: amounts[name] for name in names if name in amounts} for who, amounts in node.holders.items()}
    for entry, landed in shortage.landed:
        count = sum(1 for other in landed if other.node_id == node.node_id)
        for name in names:
            if count and entry.demand.get(name, 0.0) > 0.0:
                mine = held.setdefault(f"pool {entry.pool} of this run", {})
                mine[name] = mine.get(name, 0.0) + entry.demand[name] * count
    return {who: amounts for who, amounts in held.items() if amounts}


def _remark(node: NodeResources, entry: Entry, shortage: Shortage) -> str:
    if entry.accelerator_type is not None and node.accelerator_type != entry.accelerator_type:
        return f"; its accelerator type is {node.accelerator_type or 'unknown'}, wanted {entry.accelerator_type}"
    if any(other.pool == entry.pool and node in landed for other, landed in shortage.landed if other.strategy is None):
        return f"; taken by another entry of pool {entry.pool}, and entries are distinct nodes"
    return ""


def _reason(entry: Entry, wanted: Mapping[str, float], shortage: Shortage) -> str:
    if shortage.is_given_up:
        return "no arrangement was found in the time allowed for searching; give the nodes more room"
    unknown = [name for name in wanted if all(node.total.get(name, 0.0) == 0.0 for node in shortage.nodes)]
    if unknown:
        return f"no node has {unknown[0]}; correct pools.{entry.pool}.accelerator, or add such nodes"
    typed = [node for node in shortage.nodes if entry.accelerator_type in (None, node.accelerator_type)]
    if not typed:
        return f"no node carries accelerator type {entry.accelerator_type}; correct pools.{entry.pool}.accelerator_type"
    entries = sum(1 for other, _ in shortage.landed if other.pool == entry.pool) + 1
    if entry.strategy is None and entries > len(typed):
        return (
            f"pools.{entry.pool}.nodes wants at least {entries} distinct nodes and {len(typed)} can be used; "
            "use fewer, larger entries, or the form with bundles"
        )
    names = [
        name for name, amount in wanted.items() if all(node.total.get(name, 0.0) + 1e-4 < amount for node in typed)
    ]
    if names:
        biggest = max(node.total.get(names[0], 0.0) for node in typed)
        return (
            f"no single node has {amount_text(names[0], wanted[names[0]])}, the largest has {size(names[0], biggest)}; "
            f"make pools.{entry.pool} smaller or split it over more nodes"
        )
    return "what the nodes have is taken, see below; make a pool smaller, free a node, or add one"
