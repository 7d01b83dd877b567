"""Pools on a real Ray: what is reserved, refused, cut and joined."""

import time
from collections.abc import Callable

import pytest
import ray
from ray.util import placement_group_table

from configs.pools import PoolConfig
from resources.cluster import Cluster
from resources.placement_groups import GroupRequest, PoolError, reserve_groups
from resources.pools import Claim, ResourcePool
from resources.ranks import BundlePlace
from resources.ray_state import free_per_node


def free(resource: str) -> float:
    """Of the whole (one-node) cluster, once Ray has settled."""
    return next(iter(free_per_node().values())).get(resource, 0.0)


def settles_at(resource: str, amount: float) -> bool:
    """Whether that much of it becomes free soon; Ray reports with a small delay."""
    deadline = time.monotonic() + 10.0
    while free(resource) != amount and time.monotonic() < deadline:
        time.sleep(0.05)
    return free(resource) == amount


def standing_groups() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_two_gpu_bundles_leave_the_other_six_devices_free(cluster: Cluster) -> None:
    cluster.reserve({"main": PoolConfig(nodes=(2,), accelerator="gpu")})
    assert settles_at("GPU", 6.0)
    assert standing_groups() == [f"callsheet/{cluster.run_id}/main/0"]
    cluster.pools.release()
    assert settles_at("GPU", 8.0)
    assert settles_at("CPU", 16.0)


def test_npu_and_custom_resources_are_bundles_too(cluster: Cluster) -> None:
    cluster.reserve({"npu": PoolConfig(bundles=3, accelerator="npu")})
    assert settles_at("NPU", 1.0)
    assert [rank.local_rank for rank in cluster.pools["npu"].ranks()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PoolConfig(nodes=(9,), accelerator="gpu"), r"pool main, nodes\[0\]: 9 bundles on one node does not fit"),
        (PoolConfig(nodes=(8, 8), cpus_per_bundle=1), r"pool main, nodes\[1\]: 8 bundles on one node does not fit"),
        (PoolConfig(bundles=17), r"pool main, bundle 16 of 17 does not fit"),
        (PoolConfig(bundles=2, cpus_per_bundle=9), r"CPU 7 free of 16"),
        (
            PoolConfig(bundles=1, accelerator="tpu"),
            r"accelerator 'tpu' is unknown to this cluster, whose nodes have \['CPU', 'GPU', 'NPU'\]",
        ),
    ],
)
def test_a_pool_that_cannot_fit_is_refused_at_once_with_the_table(
    cluster: Cluster, config: PoolConfig, message: str
) -> None:
    began = time.monotonic()
    with pytest.raises(PoolError, match=message):
        cluster.reserve({"main": config})
    print(f"refused after {time.monotonic() - began:.2f} s")
    assert standing_groups() == []


def test_the_table_says_who_holds_what(open_run: Callable[[], Cluster]) -> None:
    with open_run() as first, open_run() as second:
        first.reserve({"main": PoolConfig(nodes=(6,), accelerator="gpu")})
        settles_at("GPU", 2.0)
        with pytest.raises(PoolError) as caught:
            second.reserve({"main": PoolConfig(nodes=(4,), accelerator="gpu")})
        assert "GPU 2 free of 8" in str(caught.value)
        assert f"held by: callsheet/{first.run_id}/main/0 (CPU 6, GPU 6)" in str(caught.value)


def test_if_one_pool_does_not_fit_none_is_reserved(cluster: Cluster) -> None:
    with pytest.raises(PoolError, match="pool large"):
        cluster.reserve({"small": PoolConfig(nodes=(2,)), "large": PoolConfig(nodes=(17,))})
    assert standing_groups() == []
    assert len(cluster.pools) == 0


def test_a_group_still_pending_at_the_deadline_fails_with_the_table_and_frees_the_others(local_ray: None) -> None:
    @ray.remote(num_cpus=12)
    def hold() -> None:
        time.sleep(60)

    holder = hold.remote()
    settles_at("CPU", 4.0)
    fitting = GroupRequest(name="fits", label="pool fits", bundles=({"CPU": 1.0},), strategy="PACK")
    waiting = GroupRequest(name="waits", label="pool waits", bundles=({"CPU": 8.0},), strategy="PACK")
    with pytest.raises(PoolError, match=r"pool waits: not placed within the deadline of 1 s\n(.|\n)*CPU"):
        reserve_groups([fitting, waiting], deadline_seconds=1.0)
    assert standing_groups() == []
    ray.cancel(holder, force=True)


def test_what_ray_calls_infeasible_does_not_wait_for_the_deadline(local_ray: None) -> None:
    request = GroupRequest(name="never", label="pool never", bundles=({"CPU": 99.0},), strategy="PACK")
    began = time.monotonic()
    with pytest.raises(PoolError, match="pool never: can never be placed"):
        reserve_groups([request], deadline_seconds=120.0)
    assert time.monotonic() - began < 60
    assert standing_groups() == []


def test_a_pool_is_reserved_once(cluster: Cluster) -> None:
    cluster.reserve({"main": PoolConfig(bundles=1)})
    with pytest.raises(PoolError, match="pool 'main' is reserved already"):
        cluster.reserve({"main": PoolConfig(bundles=1)})
    with pytest.raises(PoolError, match=r"there is no pool 'mian'; the pools are \['main'\]"):
        cluster.pools["mian"]


def make_pool(
    name: str = "main", per_node: tuple[int, ...] = (4, 2), first_ip: int = 9, **config: object
) -> ResourcePool:
    """A pool without a cluster: the ledger and the cuts need none."""
    from resources.pools import Bundle

    settings = PoolConfig(nodes=per_node, **config)  # type: ignore[arg-type]
    bundles = [
        Bundle(
            group=None,  # type: ignore[arg-type]
            place=BundlePlace(
                node_ip=f"10.0.0.{first_ip + node}", node_id=f"n{first_ip + node}", group_index=node, bundle_index=index
            ),
            pool=name,
            config=settings,
        )
        for node, count in reversed(list(enumerate(per_node)))
        for index in reversed(range(count))
    ]
    return ResourcePool(name, settings, bundles)


def test_bundles_are_ordered_whatever_order_they_came_in() -> None:
    pool = make_pool()
    assert pool.node_counts == [4, 2]
    assert [rank.node_ip for rank in pool.ranks()] == ["10.0.0.9"] * 4 + ["10.0.0.10"] * 2


def test_a_pool_is_split_at_node_edges_or_inside_one_node() -> None:
    pool = make_pool()
    assert [part.size for part in pool.split([4, 2])] == [4, 2]
    assert [part.name for part in pool.split({"left": 2, "middle": 2, "right": 2})] == ["left", "middle", "right"]
    with pytest.raises(PoolError, match=r"main\.1 would hold bundles 3 to 5, across a node edge; cut at \[0, 4, 6\]"):
        pool.split([3, 3])
    with pytest.raises(PoolError, match="has 6 bundles and cannot be split into"):
        pool.split([4, 1])


def test_merging_what_was_split_gives_the_same_ranks() -> None:
    pool = make_pool()
    again = ResourcePool.merge("again", list(reversed(pool.split([2, 2, 2]))))
    assert again.ranks() == pool.ranks()


def test_pools_with_other_bundles_or_shared_bundles_cannot_be_merged() -> None:
    pool = make_pool()
    with pytest.raises(PoolError, match="have different bundles"):
        ResourcePool.merge("both", [pool, make_pool("other", (2,), 20, cpus_per_bundle=2)])
    with pytest.raises(PoolError, match="share bundles"):
        ResourcePool.merge("both", [pool, pool])


@pytest.mark.parametrize("fraction", [1 / 3, 0.3333, 0.3])
def test_three_thirds_fit_on_a_bundle(fraction: float) -> None:
    pool = make_pool(per_node=(1,), accelerator="gpu", cpus_per_bundle=3)
    for name in ("actor", "rollout", "reference"):
        pool.claim(name, Claim(fraction=fraction, cpus=1))
    assert len(pool.bundles[0].claims) == 3


def test_fractions_that_overfill_a_bundle_are_refused_naming_those_there() -> None:
    pool = make_pool(per_node=(1,), accelerator="gpu", cpus_per_bundle=3)
    pool.claim("actor", Claim(fraction=0.34, cpus=1))
    pool.claim("rollout", Claim(fraction=0.34, cpus=1))
    with pytest.raises(PoolError, match=r"reference asks for fraction 0\.34 and 0\.32 is left \(there: actor 0\.34"):
        pool.claim("reference", Claim(fraction=0.34, cpus=1))
    pool.give_back("actor")
    pool.claim("reference", Claim(fraction=0.34, cpus=1))


def test_more_cpus_than_the_bundle_has_are_refused() -> None:
    pool = make_pool(per_node=(1,), cpus_per_bundle=2)
    with pytest.raises(PoolError, match=r"critic asks for 3 CPUs and 2 of 2 are left"):
        pool.claim("critic", Claim(fraction=0.0, cpus=3))


def test_more_groups_than_slots_are_refused() -> None:
    pool = make_pool(per_node=(1,), colocated_groups=1, cpus_per_bundle=2)
    pool.claim("actor", Claim(fraction=0.5, cpus=1))
    with pytest.raises(PoolError, match="critic would be group 2 on a bundle with colocated_groups 1"):
        pool.claim("critic", Claim(fraction=0.5, cpus=1))


def test_a_claim_that_fails_on_one_bundle_is_entered_on_none() -> None:
    pool = make_pool(per_node=(2,), cpus_per_bundle=1)
    pool.claim("crowd", Claim(fraction=0.0, cpus=1), bundles=[1])
    with pytest.raises(PoolError):
        pool.claim("actor", Claim(fraction=0.0, cpus=1))
    assert [list(bundle.claims) for bundle in pool.bundles] == [[], ["crowd"]]
