"""Order, environment and mesh of ranks."""

import pytest

from resources.ranks import (
    BundlePlace,
    Mesh,
    assign_ranks,
    check_distinct_devices,
    check_user_env,
    device_index,
    place_key,
    rank_env,
)


def places(*nodes: tuple[str, str, int]) -> list[BundlePlace]:
    """(ip, node id, number of bundles) -> sorted places; bundles are listed backwards on purpose."""
    made = [
        BundlePlace(node_ip=ip, node_id=node_id, group_index=group, bundle_index=bundle)
        for group, (ip, node_id, count) in enumerate(nodes)
        for bundle in reversed(range(count))
    ]
    return sorted(made, key=place_key)


def test_node_nine_comes_before_node_ten() -> None:
    ordered = places(("10.0.0.10", "a", 1), ("10.0.0.9", "b", 1))
    assert [place.node_ip for place in ordered] == ["10.0.0.9", "10.0.0.10"]


def test_nodes_of_one_address_are_ordered_by_node_id_then_bundle() -> None:
    ordered = places(("10.0.0.1", "b", 2), ("10.0.0.1", "a", 1))
    assert [(place.node_id, place.bundle_index) for place in ordered] == [("a", 0), ("b", 0), ("b", 1)]


def test_an_uneven_pool_gives_local_ranks_per_node() -> None:
    ranks = assign_ranks(places(("10.0.0.9", "a", 3), ("10.0.0.10", "b", 1)))
    assert [(r.rank, r.local_rank, r.local_world_size, r.node_rank) for r in ranks] == [
        (0, 0, 3, 0),
        (1, 1, 3, 0),
        (2, 2, 3, 0),
        (3, 0, 1, 1),
    ]


def test_every_rank_gets_the_nine_keys_and_the_agent_store() -> None:
    rank = assign_ranks(places(("10.0.0.9", "a", 2)))[1]
    assert rank_env(rank, "actor", ("10.0.0.9", 4711)) == {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "RAY_LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "WG_PREFIX": "actor",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.mark.parametrize("key", ["RANK", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"])
def test_a_reserved_key_in_the_users_env_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"roles\.critic\.env sets {key}='7'.*remove it"):
        check_user_env("critic", {"MY_FLAG": "1", key: "7"})


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [("3", 2, 0), ("0,1,2,3", 2, 2), ("4,5,6,7", 2, 2), ("", 0, None), (None, 1, 1), ("-1", 0, None)],
)
def test_the_device_follows_what_the_process_can_see(
    visible: str | None, local_rank: int, expected: int | None
) -> None:
    assert device_index(visible, local_rank) == expected


def test_a_local_rank_beyond_the_visible_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 2 sees the devices '0,1', which are only 2"):
        device_index("0,1", 2)


def test_two_ranks_of_a_node_cannot_hold_one_device() -> None:
    check_distinct_devices([(0, "a", "GPU:0"), (1, "a", "GPU:1"), (2, "b", "GPU:0")])
    with pytest.raises(ValueError, match="ranks 0 and 2 both hold device GPU:0 of node a"):
        check_distinct_devices([(0, "a", "GPU:0"), (1, "a", "GPU:1"), (2, "a", "GPU:0")])


def test_tensor_parallel_peers_are_neighbours_in_rank() -> None:
    mesh = Mesh(tp=2)
    assert [(mesh.coordinates(rank, 6).dp, mesh.coordinates(rank, 6).tp) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


def test_the_last_pipeline_stage_answers_for_its_data_parallel_rank() -> None:
    mesh = Mesh(tp=2, pp=2)
    # pp slowest: ranks 0-3 are the first stage, 4-7 the last; within a stage dp is slower than tp.
    assert [rank for rank in range(8) if mesh.is_collecting(rank, 8)] == [4, 6]
    assert [mesh.coordinates(rank, 8).dp for rank in (4, 6)] == [0, 1]


def test_a_mesh_that_does_not_divide_the_world_names_the_nearest_sizes() -> None:
    with pytest.raises(ValueError, match=r"needs a multiple of 4 ranks and the group has 6; the nearest are 4 or 8"):
        Mesh(tp=2, sp=2).dp_size(6)


def test_a_mesh_axis_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh tp is 0"):
        Mesh(tp=0)
