"""How many CPUs a local cluster counts, and what is said when they are more than there are."""

import os

import pytest

from resources.local_cluster import local_cpus, shared_cores_note
from resources.plan import build_plan, local_nodes
from tests.tasks.local_cast import small_config

MANY = "pools={main: {nodes: [1], cpus_per_bundle: 2}, engines: {nodes: [40], cpus_per_bundle: 2.5}}"
APART = ("roles.rollout={pool: engines}", "algorithm.name=grpo", "algorithm.kl.coef=0.0")


def test_pools_larger_than_the_machine_fit_the_cluster_that_is_started_for_them():
    config = small_config(MANY, *APART)
    assert local_cpus(config) == 102
    plan = build_plan(config, local_nodes(config))
    assert plan.does_fit, plan.refusals
    assert any("the pools ask for 102 CPUs and this machine has" in remark for remark in plan.remarks)


def test_a_small_config_gets_the_machines_cpus_and_no_note():
    config = small_config("pools.main.cpus_per_bundle=1", "roles.reward.cpus=0.1")
    assert local_cpus(config) == len(os.sched_getaffinity(0))
    assert shared_cores_note(config) is None


@pytest.mark.parametrize("given", ["ray.num_cpus=3", "ray.address=10.0.0.1:6379"])
def test_who_sizes_the_cluster_is_told_nothing(given: str):
    config = small_config(MANY, *APART, given)
    assert shared_cores_note(config) is None
    if "num_cpus" in given:
        assert local_cpus(config) == 3
