"""What the config says of a role is what its workers are made with."""

import pytest

from configs.layout import process_groups
from configs.load import load_config
from resources.casting import Casting, worker_spec
from resources.ranks import Mesh


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
