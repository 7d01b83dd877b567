"""What a live Ray cluster has: nodes in order, what is free on each, and who holds the rest."""

import time
from collections.abc import Mapping, Sequence

from ray.util import placement_group_table

from resources.node_resources import NodeResources
from resources.ranks import node_key
from resources.ray_state import all_nodes, free_per_node

_HIDDEN = ("node:", "object_store_memory", "bundle_group", "accelerator_type:")
SETTLE_SECONDS = 2.0
"""Ray learns what became free or taken with a delay; accounts that do not balance are read again for this long."""
_POLL_SECONDS = 0.1
_TOLERANCE = 1e-2


def settled_nodes() -> list[NodeResources]:
    """`live_nodes`, once what is free and what placement groups hold add up on every node, or after two seconds.

    Resources taken outside placement groups (by other users of the cluster) never add up and are simply not free.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    nodes = live_nodes()
    while not all(_is_balanced(node) for node in nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        nodes = live_nodes()
    return nodes


def _is_balanced(node: NodeResources) -> bool:
    held = {name: sum(amounts.get(name, 0.0) for amounts in node.holders.values()) for name in node.total}
    return all(abs(node.free[name] + held[name] - total) <= _TOLERANCE for name, total in node.total.items())


def live_nodes() -> list[NodeResources]:
    """The nodes that are alive, in numeric IP order, then node id."""
    free = free_per_node()
    holders = _holders()
    nodes = [
        NodeResources(
            ip=node["NodeManagerAddress"],
            node_id=node["NodeID"],
            total=_visible(node["Resources"]),
            free={**dict.fromkeys(_visible(node["Resources"]), 0.0), **_visible(free.get(node["NodeID"], {}))},
            labels=node.get("Labels") or {},
            holders=holders.get(node["NodeID"], {}),
        )
        for node in all_nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node_key(node.ip, node.node_id))


def _visible(resources: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own bookkeeping: node names, per-group wildcards, the object store."""
    return {
        name: float(amount)
        for name, amount in resources.items()
        if not name.startswith(_HIDDEN) and "_group_" not in name
    }


def _holders() -> dict[str, dict[str, dict[str, float]]]:
    held: dict[str, dict[str, dict[str, float]]] = {}
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        for index, node_id in group["bundles_to_node_id"].items():
            if not node_id:
                continue
            mine = held.setdefault(node_id, {}).setdefault(group["name"] or "(unnamed placement group)", {})
            for name, amount in _visible(group["bundles"][index]).items():
                mine[name] = mine.get(name, 0.0) + amount
    return held


def shortage_table(wanted: Mapping[str, Mapping[str, float]], nodes: Sequence[NodeResources]) -> str:
    """A table of what is wanted, what each node has free of it, and who holds the rest.

    `wanted` maps "pool main, bundle 0" to resources.
    """
    names = sorted({name for bundle in wanted.values() for name in _visible(bundle)})
    lines = ["wanted:"]
    lines += [f"  {who}: {_amounts(_visible(bundle))}" for who, bundle in wanted.items()]
    lines.append("nodes:")
    for node in nodes:
        cells = [f"{name} {node.free.get(name, 0.0):g} free of {node.total.get(name, 0.0):g}" for name in names]
        held = [f"{who} ({_amounts(amounts)})" for who, amounts in sorted(node.holders.items())]
        lines.append(
            f"  {node.ip} ({node.node_id[:8]}): {', '.join(cells)}; held by: {', '.join(held) if held else 'nobody'}"
        )
    return "\n".join(lines)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))
