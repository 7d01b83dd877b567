"""Fitting pools onto nodes, by hand and by property: per node, never as a total, whatever the order of input."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import load_config
from configs.run import RunConfig
from resources.node_fitting import Entry, Fitting, Shortage, fit_entries
from resources.node_resources import NodeResources, parse_nodes
from resources.placement import NoFit, Placement, fit
from resources.ranks import node_key


def with_pool(pool: str, *overrides: str) -> RunConfig:
    return load_config("gsm8k-qwen2.5-1.5b-8gpu-colocated", [f"pools.main={pool}", "roles.reward.cpus=1", *overrides])


def placed(config: RunConfig, nodes: str) -> Placement:
    found = fit(config, parse_nodes(nodes))
    assert isinstance(found, Placement), str(found)
    return found


def refused(config: RunConfig, nodes: str) -> NoFit:
    found = fit(config, parse_nodes(nodes))
    assert isinstance(found, NoFit)
    return found


def node(ip: str, **total: float) -> NodeResources:
    return NodeResources(ip=ip, node_id=f"id-{ip}", total=total, free=total)


def test_uneven_pools_rank_in_numeric_ip_order():
    config = with_pool("{nodes: [2, 1], accelerator: gpu, cpus_per_bundle: 4}")
    nodes = [node("127.0.0.10", CPU=16.0, GPU=2.0), node("127.0.0.9", CPU=16.0, GPU=1.0)]
    found = fit(config, nodes)
    assert isinstance(found, Placement)
    actors = [rank for rank in found.ranks if "actor" in rank.roles]
    assert [(rank.rank, rank.node_ip, rank.local_rank, rank.node_rank) for rank in actors] == [
        (0, "127.0.0.9", 0, 0),
        (1, "127.0.0.10", 0, 1),
        (2, "127.0.0.10", 1, 1),
    ]
    assert found.pins() == {"main": ["id-127.0.0.10", "id-127.0.0.9"]}


def test_two_entries_of_eight_are_refused_on_one_node_with_sixteen():
    found = refused(with_pool("{nodes: [8, 8], accelerator: gpu, cpus_per_bundle: 4}"), "(gpu=16,cpu=128)")
    assert "wants at least 2 distinct nodes and 1 can be used" in found.reason
    assert "pool main of this run holds 32 CPU, 8 GPU; taken by another entry of pool main" in str(found)


def test_a_total_that_suffices_is_refused_when_no_node_does():
    found = refused(with_pool("{nodes: [8], accelerator: gpu, cpus_per_bundle: 4}"), "4x(gpu=4,cpu=96)")
    assert found.reason.startswith("no single node has 8 GPU, the largest has 4")
    assert len(found.nodes) == 4


def test_the_table_says_wanted_free_and_holder():
    busy = NodeResources(
        ip="10.0.0.7",
        node_id="busy",
        total={"CPU": 64.0, "GPU": 8.0},
        free={"CPU": 60.0, "GPU": 6.0},
        holders={"callsheet/other/main/0": {"GPU": 2.0, "CPU": 4.0}},
    )
    found = fit(with_pool("{nodes: [8], accelerator: gpu, cpus_per_bundle: 4}"), [busy])
    assert str(found) == (
        "pool main (actor, rollout, reference, critic, reward), nodes[0], 8 bundles on one node, does not fit: what "
        "the nodes have is taken, see below; make a pool smaller, free a node, or add one\n"
        "  wanted on one node: 32 CPU, 8 GPU\n"
        "  10.0.0.7 (busy): 60 CPU free of 64, 6 GPU free of 8; callsheet/other/main/0 holds 4 CPU, 2 GPU"
    )


@pytest.mark.parametrize(
    ("pool", "nodes", "said"),
    [
        ("{nodes: [2], accelerator: NPU9, cpus_per_bundle: 4}", "(gpu=8,cpu=96)", "no node has NPU9"),
        ("{nodes: [2], accelerator: gpu, cpus_per_bundle: 4}", "(cpu=96)", "no node has GPU"),
        ("{nodes: [2], accelerator: gpu, cpus_per_bundle: 80}", "(gpu=8,cpu=96)", "no single node has 160 CPU"),
        (
            "{nodes: [2], cpus_per_bundle: 4, memory_per_bundle: 64GiB}",
            "(cpu=96,mem=100GiB)",
            "no single node has 128 GiB memory",
        ),
        (
            "{nodes: [2], accelerator: gpu, accelerator_type: H100, cpus_per_bundle: 4}",
            "(gpu=8,cpu=96,type=A100)",
            "no node carries accelerator type H100",
        ),
    ],
)
def test_each_kind_of_shortage_names_what_is_short(pool: str, nodes: str, said: str):
    assert said in refused(with_pool(pool, "actor.offload=false"), nodes).reason


def test_bundles_one_by_one_name_the_first_that_does_not_fit():
    found = refused(with_pool("{bundles: 12, accelerator: gpu, cpus_per_bundle: 4}"), "2x(gpu=4,cpu=96)")
    assert found.label == "bundle 8 of 12"


def test_an_accelerator_type_picks_its_nodes():
    config = with_pool("{nodes: [4], accelerator: gpu, accelerator_type: H100, cpus_per_bundle: 4}")
    assert placed(config, "2x(gpu=8,cpu=96,type=A100) + (gpu=8,cpu=96,type=H100)").pins() == {"main": ["node-3"]}


def test_a_custom_resource_is_an_accelerator_by_its_name():
    config = with_pool("{nodes: [2], accelerator: TPU_v5, cpus_per_bundle: 4}")
    assert placed(config, "(cpu=96) + (cpu=96,TPU_v5=2)").pins() == {"main": ["node-2"]}


def test_cpu_pools_leave_the_accelerator_nodes_alone():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools")
    assert placed(config, "(gpu=9,cpu=96) + (cpu=96)").pins()["graders"] == ["node-2"]


def test_pack_fills_a_node_before_the_next_and_spread_takes_turns():
    pool = "{{bundles: 4, strategy: {}, accelerator: gpu, cpus_per_bundle: 4}}"
    on = {
        strategy: [
            place.node_id
            for place in placed(with_pool(pool.format(strategy)), "3x(gpu=8,cpu=96)").pools["main"].bundles
        ]
        for strategy in ("PACK", "SPREAD")
    }
    assert on == {"PACK": ["node-1"] * 4, "SPREAD": ["node-1", "node-1", "node-2", "node-3"]}


@pytest.mark.parametrize(
    ("pool", "size", "nodes", "said"),
    [
        ("{bundles: 2, strategy: SPREAD, %s}", 2, "2x(gpu=8,cpu=96)", "ranks 0 to 1"),
        ("{bundles: 2, strategy: PACK, %s}", 2, "2x(gpu=8,cpu=96)", None),
        ("{bundles: 6, %s}", 2, "2x(gpu=3,cpu=96)", "ranks 2 to 3"),
        ("{bundles: 6, %s}", 3, "2x(gpu=3,cpu=96)", None),
        ("{bundles: 4, strategy: SPREAD, %s}", 2, "2x(gpu=8,cpu=96)", None),
    ],
)
def test_tensor_parallel_peers_that_would_lie_on_two_nodes_are_refused(
    pool: str, size: int, nodes: str, said: str | None
):
    sizes = [f"roles.rollout.tensor_parallel={size}", "data.prompts_per_iteration=96"]
    found = fit(with_pool(pool % "accelerator: gpu, cpus_per_bundle: 4", *sizes), parse_nodes(nodes))
    if said is None:
        assert isinstance(found, Placement), str(found)
        return
    assert isinstance(found, NoFit)
    assert found.reason.startswith(f"roles.rollout.tensor_parallel is {size}, and {said} of ")
    assert "would lie on two nodes (10.0.0.1, 10.0.0.2); give pools.main as nodes, each entry a multiple of" in str(
        found
    )
    assert found.wanted == {"CPU": 4.0 * size, "GPU": size}


def test_a_search_finds_the_one_arrangement_there_is():
    # Largest first and first fit would put 4 on the node with 5, and 5 would find no room.
    config = load_config(
        "gsm8k-qwen2.5-1.5b-8gpu-split-pools",
        [
            "pools.generation.nodes=[4, 2]",
            "pools.training.nodes=[3]",
            "pools.values.nodes=[3]",
            "roles.reference.workers=3",
        ],
    )
    found = placed(config, "(gpu=6,cpu=96) + (gpu=4,cpu=96) + (gpu=2,cpu=96)")
    assert found.left["node-1"]["GPU"] == found.left["node-2"]["GPU"] == found.left["node-3"]["GPU"] == 0.0


def test_ranks_see_their_neighbours_and_their_environment():
    found = placed(with_pool("{nodes: [2], accelerator: gpu, cpus_per_bundle: 4}"), "(gpu=8,cpu=96)")
    model = [rank for rank in found.ranks if "actor" in rank.roles]
    assert [rank.neighbours for rank in model] == [("reward", "advantage"), ("reward",)]
    assert model[1].env == {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "RAY_LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "WG_PREFIX": "actor+rollout+reference+critic",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "(chosen at start)",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
    }


def test_ranks_on_cpus_keep_their_memory_unless_their_role_says_otherwise():
    config = with_pool("{nodes: [1], cpus_per_bundle: 4}", "roles.critic.env={MALLOC_TRIM_THRESHOLD_: '131072'}")
    model = next(rank for rank in placed(config, "(cpu=96)").ranks if "critic" in rank.roles)
    assert (model.env["MALLOC_MMAP_MAX_"], model.env["MALLOC_TRIM_THRESHOLD_"]) == ("0", "131072")


def test_a_roles_own_environment_reaches_its_ranks():
    config = with_pool("{nodes: [1], accelerator: gpu, cpus_per_bundle: 4}", "roles.critic.env={NCCL_DEBUG: WARN}")
    found = placed(config, "(gpu=8,cpu=96)")
    assert [rank.env.get("NCCL_DEBUG") for rank in found.ranks] == ["WARN", None, None]


def test_every_other_process_is_on_the_sheet():
    names = {other.name for other in placed(load_config("quickstart"), "(cpu=4)").others}
    assert names == {"controller", "Prefect server", "task host", "grader processes", "engine children"}


@st.composite
def fleets(draw: st.DrawFn) -> list[NodeResources]:
    count = draw(st.integers(1, 5))
    nodes = []
    for index in range(count):
        total = {"CPU": float(draw(st.integers(1, 12))), "GPU": float(draw(st.integers(0, 4)))}
        used = draw(st.sampled_from([0.0, 0.5, 1.0]))
        free = {"CPU": max(0.0, total["CPU"] - used), "GPU": max(0.0, total["GPU"] - used)}
        nodes.append(NodeResources(ip=f"10.0.0.{index * 7 + 3}", node_id=f"n{index}", total=total, free=free))
    return nodes


@st.composite
def wishes(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    for pool in range(draw(st.integers(1, 4))):
        gpu = draw(st.sampled_from([0.0, 0.3333, 0.5, 1.0]))
        demand = {"CPU": draw(st.sampled_from([0.5, 1.0, 2.0]))} | ({"GPU": gpu} if gpu else {})
        strategy = draw(st.sampled_from([None, "PACK", "SPREAD"]))
        for index in range(draw(st.integers(1, 3)) if strategy is None else 1):
            entries.append(
                Entry(pool=f"p{pool}", index=index, count=draw(st.integers(1, 4)), demand=demand, strategy=strategy)
            )
    return entries


def in_order(nodes: list[NodeResources]) -> list[NodeResources]:
    return sorted(nodes, key=lambda node: node_key(node.ip, node.node_id))


@settings(max_examples=150, deadline=None)
@given(fleets(), wishes())
def test_no_node_is_ever_over_committed(nodes: list[NodeResources], entries: list[Entry]):
    found = fit_entries(entries, in_order(nodes))
    for node in nodes:
        for name in ("CPU", "GPU"):
            taken = sum(
                entry.demand.get(name, 0.0) * sum(1 for place in landed if place.node_id == node.node_id)
                for entry, landed in found.landed
            )
            assert taken <= node.free[name] + 1e-4 * (1 + len(entries) * 4)
    if isinstance(found, Fitting):
        assert {(entry.pool, entry.index): len(landed) for entry, landed in found.landed} == {
            (entry.pool, entry.index): entry.count for entry in entries
        }
        for pool in {entry.pool for entry in entries if entry.strategy is None}:
            where = [landed[0].node_id for entry, landed in found.landed if entry.pool == pool]
            assert len(set(where)) == len(where)


@settings(max_examples=100, deadline=None)
@given(fleets(), wishes(), st.randoms(use_true_random=False))
def test_the_order_of_pools_and_nodes_does_not_matter(
    nodes: list[NodeResources], entries: list[Entry], dice: random.Random
):
    first = fit_entries(entries, in_order(nodes))
    mixed_entries, mixed_nodes = list(entries), list(nodes)
    dice.shuffle(mixed_entries)
    dice.shuffle(mixed_nodes)
    assert fit_entries(mixed_entries, in_order(mixed_nodes)) == first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_entries_of_one_pool_fit_exactly_when_the_sorted_sizes_do(wanted: list[int], there: list[int]):
    nodes = [node(f"10.0.0.{index + 1}", CPU=float(count)) for index, count in enumerate(there)]
    entries = [Entry(pool="p", index=index, count=count, demand={"CPU": 1.0}) for index, count in enumerate(wanted)]
    padded = sorted(there, reverse=True) + [0] * len(wanted)
    possible = all(size <= room for size, room in zip(sorted(wanted, reverse=True), padded, strict=False))
    assert isinstance(fit_entries(entries, nodes), Fitting if possible else Shortage)
