"""All pools of a run: fitted onto the nodes, reserved together, released together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from configs.pools import PoolConfig
from resources.inventory import settled_nodes, shortage_table
from resources.node_fitting import Shortage, fit_entries, pool_entries
from resources.node_resources import NodeResources, ray_name
from resources.placement_groups import PoolError, release_groups, reserve_groups
from resources.pools import ResourcePool, build_pool, group_requests

DEADLINE_SECONDS = 120.0


class PoolManager:
    """Reserves the pools of a run. Either all of them stand or none does."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._pools: dict[str, ResourcePool] = {}
        self._groups: dict[str, list[PlacementGroup]] = {}

    def __getitem__(self, name: str) -> ResourcePool:
        if name not in self._pools:
            raise PoolError(f"there is no pool {name!r}; the pools are {sorted(self._pools)}")
        return self._pools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def reserve(
        self,
        configs: Mapping[str, PoolConfig],
        deadline_seconds: float = DEADLINE_SECONDS,
        pins: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Reserve pools.

        Args:
            configs: pool name -> its config.
            deadline_seconds: how long placement groups may stay pending.
            pins: pool name -> node id per entry of `nodes`, as preflight chose; chosen here when left out.

        Raises:
            PoolError: with a table of wanted, free and holders; at once for what cannot fit, else at the deadline.
        """
        taken = sorted(set(configs) & set(self._pools))
        if taken:
            raise PoolError(f"pool {taken[0]!r} is reserved already in run {self._run_id}")
        nodes = settled_nodes()
        chosen = pins if pins is not None else choose_nodes(configs, nodes)
        ips = {node.node_id: node.ip for node in nodes}
        requests, owners = [], []
        for name, config in configs.items():
            entries = group_requests(
                self._run_id, name, config, [(ips[node_id], node_id) for node_id in chosen.get(name, ())]
            )
            requests += entries
            owners += [name] * len(entries)
        groups = reserve_groups(requests, deadline_seconds)
        for name, config in configs.items():
            mine = [group for owner, group in zip(owners, groups, strict=True) if owner == name]
            self._groups[name] = mine
            self._pools[name] = build_pool(name, config, mine, ips)

    def release_pool(self, name: str) -> None:
        """Give one pool back, so that it can be reserved anew on other nodes."""
        self._pools.pop(name, None)
        release_groups(self._groups.pop(name, []))

    def release(self) -> None:
        """Give every pool back, whatever still runs there; detached ones stay for `callsheet clean`."""
        ending = [name for name, pool in self._pools.items() if pool.config.lifetime == "run"]
        groups = [group for name in ending for group in self._groups[name]]
        self._pools.clear()
        self._groups.clear()
        release_groups(groups)


def choose_nodes(configs: Mapping[str, PoolConfig], nodes: Sequence[NodeResources]) -> dict[str, list[str]]:
    """A node id per entry of `nodes`, as preflight chooses. Raises PoolError with the table for what does not fit."""
    entries = [entry for name, config in configs.items() for entry in pool_entries(name, config)]
    fitting = fit_entries(entries, nodes)
    if isinstance(fitting, Shortage):
        raise PoolError(_refusal(fitting, configs[fitting.entry.pool], nodes))
    chosen: dict[str, list[str]] = {}
    for entry, landed in fitting.landed:
        if entry.strategy is None:
            chosen.setdefault(entry.pool, []).append(landed[0].node_id)
    return chosen


def _refusal(shortage: Shortage, config: PoolConfig, nodes: Sequence[NodeResources]) -> str:
    entry = shortage.entry
    if entry.strategy is None:
        who, count = f"pool {entry.pool}, nodes[{entry.index}]: {entry.count} bundles on one node", entry.count
    else:
        who, count = f"pool {entry.pool}, bundle {shortage.bundle} of {entry.count}", 1
    needed = {resource: amount * count for resource, amount in entry.demand.items()}
    resource = ray_name(config.accelerator)
    known = sorted({name for node in nodes for name in node.total} - {"memory"})
    if resource is not None and resource not in known:
        return (
            f"{who}: accelerator {config.accelerator!r} is unknown to this cluster, whose nodes have "
            f"{known}; name one of those or `none`"
        )
    now = [replace(node, free=shortage.left[node.node_id]) for node in nodes]
    table = shortage_table({who: needed}, now)
    return f"{who} does not fit on any node (free counts what this run's other pools take)\n{table}"
