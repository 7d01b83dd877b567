"""Tensor-parallel peers share every layer, so all of one set lie on one node; known once bundles have their nodes.

In the `nodes` form the config tells; where bundles of the `bundles` form land, the plan guesses and Ray decides.
"""

from collections.abc import Sequence

from configs.layout import ProcessGroup
from configs.run import RunConfig
from resources.ranks import RankPlace


def peers_apart(config: RunConfig, group: ProcessGroup, places: Sequence[RankPlace]) -> str | None:
    """What is wrong with a group whose ranks lie at `places`; None where no peers lie on two nodes."""
    for role in group.roles:
        size = config.roles[role].tensor_parallel if role in config.roles else 1
        for first in range(0, len(places), size):
            nodes = dict.fromkeys(place.node_ip for place in places[first : first + size])
            if len({place.node_id for place in places[first : first + size]}) > 1:
                return (
                    f"roles.{role}.tensor_parallel is {size}, and ranks {first} to {first + size - 1} of {group.name}, "
                    f"which share every layer, would lie on two nodes ({', '.join(nodes)}); give pools.{group.pool} as "
                    f"nodes, each entry a multiple of {size}, or lower tensor_parallel"
                )
    return None
