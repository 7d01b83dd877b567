"""What the config says of a role is what its workers are made with."""

import pytest

from configs.layout import HYBRID_ROLES, process_groups
from configs.load import load_config
from resources.casting import Casting, check_peers, worker_spec
from resources.placement_groups import PoolError
from resources.pools import Bundle, ResourcePool
from resources.ranks import BundlePlace, Mesh


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_the_sizes_of_the_config_cut_the_model_and_the_calls_alike(role: str):
    placed = f"{{pool: {role}, tensor_parallel: 2, sequence_parallel: 2}}"
    config = load_config("quickstart", [f"pools.{role}={{nodes: [4], cpus_per_bundle: 2}}", f"roles.{role}={placed}"])
    group = next(group for group in process_groups(config) if group.name == role)
    spec = worker_spec(Casting(config=config, model=config.model), group, role)
    assert (spec.kwargs["tensor_parallel"], spec.kwargs["sequence_parallel"]) == (2, 2)
    assert spec.mesh == Mesh(tp=2, sp=2)


def test_the_engines_are_made_of_as_many_ranks_as_the_config_says():
    placed = "{pool: engines, tensor_parallel: 2}"
    config = load_config("quickstart", ["pools.engines={nodes: [4], cpus_per_bundle: 2}", f"roles.rollout={placed}"])
    group = next(group for group in process_groups(config) if group.name == "rollout")
    spec = worker_spec(Casting(config=config, model=config.model), group, "rollout")
    assert (spec.kwargs["tensor_parallel"], spec.mesh) == (2, Mesh(tp=2))


@pytest.mark.parametrize("is_rollout_first", [False, True])
def test_each_of_several_fused_roles_is_cut_as_its_own_entry_says(is_rollout_first: bool):
    """Rows are dealt out by the mesh of a role: workers of other sizes would compute them twice, or for nobody."""
    roles = [
        "actor: {%s, sequence_parallel: 2}",
        "rollout: {%s, tensor_parallel: 2}",
        "reference: {%s}",
        "critic: {%s}",
    ]
    order = [roles[1], roles[0], *roles[2:]] if is_rollout_first else roles
    fused = ", ".join(role % "pool: main, colocate: fused" for role in order)
    config = load_config(
        "quickstart", ["pools.main={nodes: [4], cpus_per_bundle: 2}", f"roles={{{fused}, reward: {{pool: main}}}}"]
    )
    group = next(group for group in process_groups(config) if "actor" in group.roles)
    sizes = {"actor": (1, 2), "rollout": (2, 1), "reference": (1, 1), "critic": (1, 1), "reward_trainer": (1, 2)}
    for duty, (tp, sp) in sizes.items():
        spec = worker_spec(Casting(config=config, model=config.model), group, duty)
        assert (spec.kwargs["tensor_parallel"], spec.kwargs.get("sequence_parallel", 1)) == (tp, sp), duty
        assert spec.mesh == Mesh(tp=tp, sp=sp), duty


@pytest.mark.parametrize("hybrid", HYBRID_ROLES)
def test_the_duties_of_a_hybrid_role_are_cut_alike(hybrid: str):
    role = f"{{{hybrid}: {{pool: main, tensor_parallel: 2}}, reward: {{pool: main}}}}"
    config = load_config(
        "quickstart-grpo",
        ["pools.main={nodes: [4], cpus_per_bundle: 2}", f"roles={role}", "algorithm.kl.coef=0"],
    )
    group = next(group for group in process_groups(config) if hybrid in group.roles)
    for duty in HYBRID_ROLES[hybrid]:
        spec = worker_spec(Casting(config=config, model=config.model), group, duty)
        assert (spec.kwargs["tensor_parallel"], spec.mesh) == (2, Mesh(tp=2)), duty


@pytest.mark.parametrize("first", ["actor", "rollout"])
def test_what_sits_with_the_actor_has_its_place_and_a_worker_class_of_its_own(first: str):
    order = [first, *({"actor", "rollout"} - {first})]
    worker = {"actor": ", worker: 'my:Actor'", "rollout": ""}
    fused = ", ".join(f"{role}: {{pool: main, colocate: fused{worker[role]}}}" for role in order)
    config = load_config("quickstart-grpo", [f"roles={{{fused}, reward: {{pool: main}}}}", "algorithm.kl.coef=0"])
    group = next(group for group in process_groups(config) if "actor" in group.roles)
    workers = {
        duty: worker_spec(Casting(config=config, model=config.model), group, duty).worker
        for duty in ("actor", "demonstrations")
    }
    demonstrations = "resources.workers.demonstrations:DemonstrationWorker"
    assert workers == {"actor": "my:Actor", "demonstrations": demonstrations}


@pytest.mark.parametrize(("nodes", "is_refused"), [("aabb", False), ("abbb", True), ("aaab", True)])
def test_engines_whose_ranks_ray_put_on_two_nodes_are_refused(nodes: str, is_refused: bool):
    pool = "{bundles: 4, cpus_per_bundle: 2}"
    config = load_config("quickstart", [f"pools.engines={pool}", "roles.rollout={pool: engines, tensor_parallel: 2}"])
    places = [
        BundlePlace(node_ip=f"10.0.0.{ord(node)}", node_id=node, group_index=0, bundle_index=index)
        for index, node in enumerate(nodes)
    ]
    bundles = [
        Bundle(group=None, place=place, pool="engines", config=config.pools["engines"])  # pyright: ignore[reportArgumentType]
        for place in places
    ]
    group = next(group for group in process_groups(config) if group.name == "rollout")
    landed = ResourcePool("engines", config.pools["engines"], bundles)
    if not is_refused:
        check_peers(config, landed, group)
        return
    with pytest.raises(PoolError, match=r"pool engines: roles.rollout.tensor_parallel is 2, and ranks \d to \d"):
        check_peers(config, landed, group)


@pytest.mark.parametrize("is_advantage_last", [False, True])
def test_every_worker_of_a_fused_process_is_made_with_the_threads_of_the_process(is_advantage_last: bool):
    """Each sets torch's threads for all that sit with it, so the last one made would decide."""
    models = ["actor", "rollout", "reference", "critic"]
    order = [*models, "advantage"] if is_advantage_last else ["advantage", *models]
    fused = ", ".join(f"{role}: {{pool: main, colocate: fused}}" for role in order)
    config = load_config("quickstart", [f"roles={{{fused}, reward: {{pool: main}}}}"])
    group = next(group for group in process_groups(config) if "advantage" in group.roles)
    specs = [worker_spec(Casting(config=config, model=config.model), group, duty) for duty in order]
    assert [(spec.threads, spec.kwargs["threads"]) for spec in specs] == [(2, 2)] * 5


def test_an_advantage_worker_alone_has_the_threads_that_its_role_says():
    config = load_config("quickstart", ["roles.advantage={pool: main, threads: 2}"])
    group = next(group for group in process_groups(config) if group.roles == ("advantage",))
    assert worker_spec(Casting(config=config, model=config.model), group, "advantage").kwargs == {"threads": 2}
