"""A smaller cast after a node was lost."""

from pathlib import Path

from tasks.shrink import shrink
from tests.chaos.runs import tiny_config

POOLS = {
    "learn": {"nodes": [1, 1], "cpus_per_bundle": 1},
    "sample": {"bundles": 3, "cpus_per_bundle": 1},
    "judge": {"nodes": [1], "cpus_per_bundle": 1},
}
ROLES = {"actor": {"pool": "learn", "workers": 2}, "rollout": {"pool": "sample", "workers": 6}}


def test_the_largest_of_the_lost_pools_gets_smaller_and_its_roles_keep_their_workers_per_bundle(tmp_path: Path):
    config = tiny_config(tmp_path, "x", "split", pools=POOLS, roles=ROLES)
    smaller = shrink(config, {"learn", "sample"})
    assert smaller is not None
    assert smaller.pools["sample"].bundles == 2
    assert smaller.roles["rollout"].workers == 4
    assert smaller.pools["learn"].nodes == (1, 1)


def test_pools_that_lost_nothing_stay(tmp_path: Path):
    smaller = shrink(tiny_config(tmp_path, "x", "split", pools=POOLS, roles=ROLES), {"learn"})
    assert smaller is not None
    assert smaller.pools["learn"].nodes == (1,)
    assert smaller.roles["actor"].workers == 1
    assert smaller.pools["sample"].bundles == 3


def test_pools_of_one_bundle_cannot_get_smaller(tmp_path: Path):
    assert shrink(tiny_config(tmp_path, "x", "split", pools=POOLS, roles=ROLES), {"judge"}) is None


def test_ranks_that_would_not_divide_any_more_are_refused(tmp_path: Path):
    roles = {**ROLES, "actor": {"pool": "learn", "workers": 2, "tensor_parallel": 2}}
    pools = {**POOLS, "learn": {"bundles": 2, "cpus_per_bundle": 1}}
    assert shrink(tiny_config(tmp_path, "x", "split", pools=pools, roles=roles), {"learn"}) is None
