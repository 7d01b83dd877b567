"""What `--set` makes of a layout: refused where it would change nothing, with a way out that leads out."""

from dataclasses import replace

import pytest

from configs.load import load_config
from resources.telemetry.topology import Topology, override_topology

ROLES = ("actor", "critic", "rollout")
BASE = Topology(pools=dict.fromkeys(ROLES, 1), roles={role: role for role in ROLES})
FUSED = Topology(pools={"main": 1}, roles=dict.fromkeys(ROLES, "main"), colocate=dict.fromkeys(ROLES, "fused"))


def test_the_size_of_a_pool_that_no_role_stands_in_is_refused_and_of_one_that_roles_leave_or_join_is_not():
    base = BASE
    with pytest.raises(
        ValueError, match=r"pools\.nope\.bundles is 4; no role stands in pool 'nope'.*pool=nope, or name"
    ):
        override_topology(base, {"pools.nope.bundles": "4"})
    left = override_topology(base, {"pools.critic": "4", "roles.critic.pool": "actor"})
    assert "critic" not in left.pools
    joined = override_topology(base, {"pools.nope": "4", "roles.critic.pool": "nope"})
    assert joined.ranks_of("critic") == 4


def test_the_bundles_of_a_pool_may_be_given_as_the_config_gives_nodes():
    assert override_topology(BASE, {"pools.actor.nodes": "[2, 4]"}).ranks_of("actor") == 6
    with pytest.raises(ValueError, match=r"pools\.actor\.nodes is x; it is a whole number"):
        override_topology(BASE, {"pools.actor.nodes": "[x]"})


def test_a_role_has_no_more_ranks_than_workers():
    layout = replace(BASE, pools={**BASE.pools, "actor": 4}, workers={"actor": 2, "critic": 8})
    assert (layout.ranks_of("actor"), layout.ranks_of("critic"), layout.ranks_of("rollout")) == (2, 1, 1)


def test_the_way_out_of_a_rollout_ahead_leads_to_a_layout_that_config_and_what_if_take():
    """pools.NAME.bundles and roles.rollout.pool=NAME with roles.rollout.colocate=shared."""
    changes = {
        "pools.e.bundles": "1",
        "roles.rollout.pool": "e",
        "roles.rollout.colocate": "shared",
        "async_depth": "1",
    }
    ahead = override_topology(FUSED, changes)
    assert ahead.async_depth == 1
    assert load_config("quickstart", [f"{key}={value}" for key, value in changes.items()]).async_depth == 1
    with pytest.raises(ValueError, match=r"with roles\.rollout\.colocate=shared, or set async_depth to 0"):
        override_topology(FUSED, {"async_depth": "1"})
