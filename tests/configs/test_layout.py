"""Which processes a config asks for, and what each takes of its bundle. Numbers by hand."""

import pytest

from configs.layout import active_roles, cut, data_parallel_size, process_groups, styles
from configs.load import check_config, dump_config, load_config


def groups(source: str, *overrides: str) -> dict[str, tuple[tuple[int, ...], float, float, int]]:
    return {
        group.name: (group.bundles, group.cpus, group.accelerators, group.threads)
        for group in process_groups(load_config(source, overrides))
    }


def test_a_third_is_cut_to_rays_granularity():
    assert [cut(share) for share in (1 / 3, 0.3333333, 0.3, 0.1 + 0.2, 1.0)] == [0.3333, 0.3333, 0.3, 0.3, 1.0]


def test_fused_roles_are_one_process():
    # 2 CPUs among the fused process, the reward worker and the advantage worker
    assert groups("quickstart") == {
        "actor+rollout+reference+critic": ((0,), 0.6666, 0.0, 2),
        "reward": ((0,), 0.6666, 0.0, 1),
        "advantage": ((0,), 0.6666, 0.0, 1),
    }


def test_roles_that_the_algorithm_does_not_read_get_no_process():
    config = load_config("quickstart", ["algorithm.name=grpo", "rollout.group_size=2", "algorithm.kl.coef=0.0"])
    assert active_roles(config) == ("actor", "rollout", "reward")
    assert [group.name for group in process_groups(config)] == ["actor+rollout", "reward", "advantage"]


def test_split_pools_take_whole_accelerators_and_shares_as_given():
    found = groups("gsm8k-qwen2.5-1.5b-8gpu-split-pools")
    assert found["rollout"] == ((0, 1, 2, 3), 4.0, 1.0, 4)
    assert found["actor"] == ((0, 1), 2.6666, 0.7, 4)
    assert found["reference"] == ((0, 1), 2.6666, 0.3, 4)
    assert found["reward"] == ((0,), 8.0, 0.0, 1)
    assert found["advantage"] == ((0,), 2.6666, 0.0, 1)


def test_processes_without_a_share_divide_what_is_left():
    split = [
        "roles.actor={pool: training, fraction: 0.5}",
        "roles.reference={pool: training}",
        "roles.critic={pool: training}",
        "pools={generation: {nodes: [4], accelerator: gpu}, graders: {nodes: [1]},"
        " training: {nodes: [2], accelerator: gpu, cpus_per_bundle: 8}}",
    ]
    found = groups("gsm8k-qwen2.5-1.5b-8gpu-split-pools", *split)
    assert [found[role][2] for role in ("actor", "reference", "critic")] == [0.5, 0.25, 0.25]


def test_a_share_is_of_the_bundle_and_a_bundle_may_be_a_share_of_a_card():
    halves = "pools.main={nodes: [1], accelerator: gpu, accelerators_per_bundle: 0.5, cpus_per_bundle: 8}"
    assert groups("gsm8k-qwen2.5-0.5b-1gpu", halves)["actor+rollout+reference"][2] == 0.5


def test_more_workers_than_bundles_sit_side_by_side():
    assert groups("quickstart", "pools.main.nodes=[2]", "roles.reward.workers=4")["reward"][0] == (0, 0, 1, 1)


def test_fewer_workers_than_bundles_take_the_first_ones():
    assert groups("quickstart", "pools.main.nodes=[3]", "roles.reward.workers=2")["reward"][0] == (0, 1)


def test_tensor_parallel_peers_share_a_data_parallel_rank():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools", ["roles.rollout.tensor_parallel=2"])
    assert data_parallel_size(config, "rollout") == 2


def test_the_duties_of_a_hybrid_role_are_fused():
    data = dump_config(load_config("quickstart-grpo"))
    place = data["roles"].pop("actor")
    del data["roles"]["rollout"]
    data["roles"] = {"actor_rollout": {**place, "colocate": "shared"}} | {
        role: {**where, "colocate": "shared"} for role, where in data["roles"].items()
    }
    found = styles(check_config(data))
    assert (found["actor"], found["rollout"], found["reward"]) == ("fused", "fused", "shared")


@pytest.mark.parametrize("light", ["reward", "advantage"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_process_with_a_model_has_the_bundles_threads_wherever_a_light_role_stands(light: str, is_first: bool):
    # 2 CPUs; the other light role is a process of its own, with one thread
    models = ["actor", "rollout", "reference", "critic"]
    order = [light, *models] if is_first else [*models, light]
    fused = ", ".join(f"{role}: {{pool: main, colocate: fused}}" for role in order)
    other = "" if light == "reward" else ", reward: {pool: main}"
    found = groups("quickstart", f"roles={{{fused}{other}}}")
    alone = "advantage" if light == "reward" else "reward"
    assert {name: threads for name, (_, _, _, threads) in found.items()} == {"+".join(order): 2, alone: 1}


def test_fused_roles_without_a_model_are_one_thread():
    fused = ", ".join(f"{role}: {{pool: graders, colocate: fused}}" for role in ("reward", "advantage"))
    models = ", ".join(f"{role}: {{pool: main}}" for role in ("actor", "rollout", "reference", "critic"))
    pools = "pools={main: {nodes: [1], cpus_per_bundle: 8}, graders: {nodes: [1], cpus_per_bundle: 2}}"
    assert groups("quickstart", pools, f"roles={{{models}, {fused}}}")["reward+advantage"][3] == 1
