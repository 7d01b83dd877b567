"""The search behind `placement.fit`: entries of bundles onto nodes, each node within what is free there.

Entries of the `nodes` form are placed by a depth-first search, hardest first, so that a placement is found where
there is one; the `bundles` form follows greedily as Ray itself does it. Order of input never matters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from configs.pools import PoolConfig
from resources.node_resources import NodeResources, bundle_demand

TOLERANCE = 1e-4
"""Ray's granularity; shares that differ by less are the same."""
MAX_TRIES = 20_000
"""Placements tried before the search gives up; far above what a hundred nodes need."""
_SCARCE_FIRST = ("GPU", "NPU")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Bundles of one placement group: `count` on one node (strategy None), or spread as the strategy says."""

    pool: str
    index: int
    count: int
    demand: Mapping[str, float]
    """Of one bundle."""
    accelerator_type: str | None = None
    strategy: Literal["PACK", "SPREAD"] | None = None


def pool_entries(name: str, pool: PoolConfig) -> list[Entry]:
    """One entry per `nodes` item, or one for a pool of the `bundles` form."""
    demand = bundle_demand(pool)
    if pool.nodes is None:
        loose = Entry(
            pool=name,
            index=0,
            count=pool.size,
            demand=demand,
            accelerator_type=pool.accelerator_type,
            strategy=pool.strategy,
        )
        return [loose]
    return [
        Entry(pool=name, index=index, count=count, demand=demand, accelerator_type=pool.accelerator_type)
        for index, count in enumerate(pool.nodes)
    ]


Landed = tuple[tuple[Entry, tuple[NodeResources, ...]], ...]
"""Entry and the node of each of its bundles."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Everything fits."""

    landed: Landed
    left: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The first entry that does not fit, and the state of the nodes at that moment."""

    entry: Entry
    bundle: int
    nodes: tuple[NodeResources, ...]
    left: Mapping[str, Mapping[str, float]]
    landed: Landed
    is_given_up: bool = False


Free = dict[str, dict[str, float]]


def fit_entries(entries: Sequence[Entry], nodes: Sequence[NodeResources]) -> Fitting | Shortage:
    """Place all entries. `nodes` must be sorted; the result lists entries in the order of pools and indices."""
    whole = sorted((entry for entry in entries if entry.strategy is None), key=_hardness)
    loose = sorted((entry for entry in entries if entry.strategy is not None), key=_hardness)
    search = _Search(whole, loose, tuple(nodes))
    solution = search.run()
    if solution is None:
        assert search.deepest is not None
        return search.deepest
    landed, left = solution
    return Fitting(landed=tuple(sorted(landed, key=lambda item: (item[0].pool, item[0].index))), left=left)


def fits(demand: Mapping[str, float], count: int, free: Mapping[str, float]) -> bool:
    """Whether `count` bundles fit into what is free."""
    return all(free.get(name, 0.0) + TOLERANCE >= amount * count for name, amount in demand.items())


def _hardness(entry: Entry) -> tuple[bool, bool, float, float, str, int]:
    scarce = sum(amount for name, amount in entry.demand.items() if name not in ("CPU", "memory")) * entry.count
    typed = entry.accelerator_type is None
    return typed, scarce == 0.0, -scarce, -entry.demand["CPU"] * entry.count, entry.pool, entry.index


class _Search:
    """Depth first over the whole entries; the loose ones are the check at the bottom."""

    def __init__(self, whole: Sequence[Entry], loose: Sequence[Entry], nodes: tuple[NodeResources, ...]) -> None:
        self.whole, self.loose, self.nodes = whole, loose, nodes
        self.free: Free = {node.node_id: dict(node.free) for node in nodes}
        self.landed: list[tuple[Entry, tuple[NodeResources, ...]]] = []
        self.deepest: Shortage | None = None
        self.depth_of_deepest = -1
        self.tries = 0

    def run(self) -> tuple[Landed, Free] | None:
        return self._place(0)

    def _place(self, depth: int) -> tuple[Landed, Free] | None:
        if depth == len(self.whole):
            return self._place_loose()
        entry = self.whole[depth]
        seen: set[tuple[object, ...]] = set()
        for node in self._candidates(entry):
            state = (node.labels.get("ray.io/accelerator-type"), *sorted(self.free[node.node_id].items()))
            pools_here = tuple(sorted({other.pool for other, landed in self.landed if node in landed}))
            if (state, pools_here) in seen:
                continue  # A node like one that was tried already leads nowhere new.
            seen.add((state, pools_here))
            self.tries += 1
            self._take(entry, node, entry.count, 1.0)
            self.landed.append((entry, (node,) * entry.count))
            solution = self._place(depth + 1)
            if solution is not None:
                return solution
            self.landed.pop()
            self._take(entry, node, entry.count, -1.0)
            if self.tries > MAX_TRIES:
                self._remember(entry, 0, depth, is_given_up=True)
                return None
        self._remember(entry, 0, depth)
        return None

    def _candidates(self, entry: Entry) -> Iterator[NodeResources]:
        taken = {landed[0].node_id for other, landed in self.landed if other.pool == entry.pool}
        usable = [
            node
            for node in self.nodes
            if node.node_id not in taken
            and _has_type(entry, node)
            and fits(entry.demand, entry.count, self.free[node.node_id])
        ]
        yield from sorted(usable, key=lambda node: (self._waste(entry, node), self.nodes.index(node)))

    def _waste(self, entry: Entry, node: NodeResources) -> tuple[float, float]:
        """Accelerators that the entry would leave without CPUs, then how loosely it sits."""
        unused = sum(
            amount for name, amount in self.free[node.node_id].items() if name not in ("CPU", "memory", *entry.demand)
        )
        main = next((name for name in entry.demand if name not in ("CPU", "memory")), "CPU")
        return unused, self.free[node.node_id].get(main, 0.0) - entry.demand[main] * entry.count

    def _place_loose(self) -> tuple[Landed, Free] | None:
        free_before = {node_id: dict(free) for node_id, free in self.free.items()}
        kept = len(self.landed)
        for number, entry in enumerate(self.loose):
            where: list[NodeResources] = []
            for bundle in range(entry.count):
                node = self._loose_node(entry, where)
                if node is None:
                    self.landed.append((entry, tuple(where)))
                    self._remember(entry, bundle, len(self.whole) + number)
                    del self.landed[kept:]
                    self.free = free_before
                    return None
                self._take(entry, node, 1, 1.0)
                where.append(node)
            where.sort(key=self.nodes.index)
            self.landed.append((entry, tuple(where)))
        return tuple(self.landed), self.free

    def _loose_node(self, entry: Entry, where: Sequence[NodeResources]) -> NodeResources | None:
        usable = [
            node for node in self.nodes if _has_type(entry, node) and fits(entry.demand, 1, self.free[node.node_id])
        ]
        if entry.strategy == "SPREAD":
            return min(
                usable,
                key=lambda node: (where.count(node), self._waste(entry, node), self.nodes.index(node)),
                default=None,
            )
        # PACK: stay where the last bundle went, else open the node that holds most.
        if where and where[-1] in usable:
            return where[-1]
        return min(
            usable,
            key=lambda node: (self._waste(entry, node)[0], -self._capacity(entry, node), self.nodes.index(node)),
            default=None,
        )

    def _capacity(self, entry: Entry, node: NodeResources) -> int:
        free = self.free[node.node_id]
        return int(min((free.get(name, 0.0) + TOLERANCE) // amount for name, amount in entry.demand.items()))

    def _take(self, entry: Entry, node: NodeResources, count: int, sign: float) -> None:
        free = self.free[node.node_id]
        for name, amount in entry.demand.items():
            free[name] = free.get(name, 0.0) - sign * amount * count

    def _remember(self, entry: Entry, bundle: int, depth: int, is_given_up: bool = False) -> None:
        if depth > self.depth_of_deepest or is_given_up:
            self.depth_of_deepest = depth
            self.deepest = Shortage(
                entry=entry,
                bundle=bundle,
                nodes=self.nodes,
                left={node_id: dict(free) for node_id, free in self.free.items()},
                landed=tuple(self.landed),
                is_given_up=is_given_up,
            )


def _has_type(entry: Entry, node: NodeResources) -> bool:
    return entry.accelerator_type is None or node.accelerator_type == entry.accelerator_type
