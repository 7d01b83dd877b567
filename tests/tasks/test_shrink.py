"""A smaller cast after a node was lost: as many bundles as fit on the nodes that are left, and as the rules allow."""

from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig
from resources.node_resources import parse_nodes
from tasks.shrink import shrink
from tests.chaos.runs import tiny_config

POOLS = {
    "learn": {"nodes": [1, 1], "cpus_per_bundle": 1},
    "sample": {"bundles": 3, "cpus_per_bundle": 1},
    "judge": {"nodes": [1], "cpus_per_bundle": 1},
}
MODEL_AND_DATA: dict[str, Any] = {
    "model": {
        "shape": {
            "num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 8, "vocab_size": 128,
            "max_positions": 32,
        }
    },
    "data": {"prompts_per_iteration": 48},
}  # fmt: skip
ROLES = {"actor": {"pool": "learn", "workers": 2}, "rollout": {"pool": "sample", "workers": 6}}


def config_of(tmp_path: Path, learn: dict[str, Any] | None = None, actor: dict[str, Any] | None = None) -> RunConfig:
    """With another pool for actor and critic, or more settings of the actor."""
    pools = {**POOLS, **({"learn": {"cpus_per_bundle": 1, **learn}} if learn is not None else {})}
    placed = {"pool": "learn", "workers": None, **actor} if actor is not None else ROLES["actor"]
    critic = {"pool": "learn", "workers": placed["workers"]}
    roles = {**ROLES, "actor": placed, "critic": critic}
    return tiny_config(tmp_path, "x", "split", pools=pools, roles=roles, **MODEL_AND_DATA)


def test_the_largest_of_the_lost_pools_gets_smaller_and_its_roles_keep_their_workers_per_bundle(tmp_path: Path):
    smaller = shrink(config_of(tmp_path), {"learn", "sample"}, parse_nodes("2x(cpu=2)"))
    assert smaller is not None
    assert smaller.pools["sample"].bundles == 2
    assert smaller.roles["rollout"].workers == 4
    assert smaller.pools["learn"].nodes == (1, 1)


def test_pools_that_lost_nothing_stay(tmp_path: Path):
    smaller = shrink(config_of(tmp_path), {"learn"}, parse_nodes("(cpu=2)"))
    assert smaller is not None
    assert smaller.pools["learn"].nodes == (1,)
    assert smaller.roles["actor"].workers == 1
    assert smaller.pools["sample"].bundles == 3


def test_pools_of_one_bundle_cannot_get_smaller(tmp_path: Path):
    assert shrink(config_of(tmp_path), {"judge"}, parse_nodes("(cpu=0.5)")) is None


def test_ranks_that_would_not_divide_any_more_are_refused(tmp_path: Path):
    config = config_of(tmp_path, {"bundles": 2}, {"workers": 2, "tensor_parallel": 2})
    assert shrink(config, {"learn"}, parse_nodes("(cpu=1)")) is None


@pytest.mark.parametrize(
    ("before", "left", "after"),
    [
        ([8, 4], "(cpu=4)", (4,)),
        ([8, 4], "(cpu=8)", (8,)),
        ([4, 8], "(cpu=8)", (8,)),
        ([8], "(cpu=4)", (4,)),
        ([8, 4], "2x(cpu=4)", (4, 4)),
        ([8, 4], "(cpu=6) + (cpu=2)", (6, 2)),
        ([8, 8], "(cpu=8) + (cpu=4)", (8, 4)),
        ([4], "(cpu=1)", (1,)),
    ],
)
def test_what_fits_on_the_nodes_that_are_left_is_kept_whichever_entry_lost_its_node(
    tmp_path: Path, before: list[int], left: str, after: tuple[int, ...]
):
    smaller = shrink(config_of(tmp_path, {"nodes": before}, {}), {"learn"}, parse_nodes(left))
    assert smaller is not None
    assert smaller.pools["learn"].nodes == after


@pytest.mark.parametrize(
    ("before", "peers", "left", "after"),
    [
        ([8], {"tensor_parallel": 2}, "(cpu=5)", (4,)),
        ([8, 8], {"tensor_parallel": 4}, "2x(cpu=6)", (4, 4)),
        ([8, 8], {"tensor_parallel": 4}, "(cpu=8) + (cpu=3)", (8,)),
        ([8], {"sequence_parallel": 4}, "(cpu=7)", (4,)),
        ([8, 4], {"sequence_parallel": 4}, "(cpu=8) + (cpu=3)", (8,)),
        ([8, 8], {"sequence_parallel": 4}, "(cpu=8) + (cpu=5)", (8, 4)),
    ],
)
def test_tensor_parallel_peers_keep_their_node_and_parallel_sizes_divide_a_smaller_cast(
    tmp_path: Path, before: list[int], peers: dict[str, int], left: str, after: tuple[int, ...]
):
    config = config_of(tmp_path, {"nodes": before}, peers)
    smaller = shrink(config, {"learn"}, parse_nodes(left))
    assert smaller is not None
    assert smaller.pools["learn"].nodes == after


def test_a_pool_that_could_not_be_had_though_it_seems_to_fit_gets_smaller_all_the_same(tmp_path: Path):
    smaller = shrink(config_of(tmp_path, {"bundles": 4}, {}), {"learn"}, parse_nodes("(cpu=8)"))
    assert smaller is not None
    assert smaller.pools["learn"].bundles == 3


def test_fewer_workers_than_bundles_stay_as_many_as_there_are_bundles_for(tmp_path: Path):
    smaller = shrink(config_of(tmp_path, {"bundles": 4}, {"workers": 2}), {"learn"}, parse_nodes("(cpu=3)"))
    assert smaller is not None
    assert (smaller.pools["learn"].bundles, smaller.roles["actor"].workers) == (3, 2)


def test_two_pools_that_compete_for_a_node_give_way_largest_first(tmp_path: Path):
    smaller = shrink(config_of(tmp_path, {"nodes": [8]}, {}), {"learn", "sample"}, parse_nodes("(cpu=6)"))
    assert smaller is not None
    assert (smaller.pools["learn"].nodes, smaller.pools["sample"].bundles) == ((3,), 3)
