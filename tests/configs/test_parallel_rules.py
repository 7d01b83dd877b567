"""Rules about models that are cut over ranks, where the config gives their shape: four heads, two key/value heads."""

import pytest

from tests.configs.test_rules import problems, the_problem

ROLES = ("actor", "critic", "reference", "rollout", "reward")


def cut(ranks: int, **settings: str) -> list[str]:
    """A pool of that many bundles, where some roles have more settings."""
    roles = [f"roles.{role}={{pool: main{settings.get(role, '')}}}" for role in ROLES]
    heads = ["model.shape.num_heads=4", "model.shape.num_kv_heads=2"]
    return [f"pools.main={{nodes: [{ranks}], cpus_per_bundle: 8}}", *roles, *heads]


@pytest.mark.parametrize("role", ["actor", "critic", "reference", "rollout"])
@pytest.mark.parametrize(("ranks", "said"), [(3, "num_heads is 4, and 3 ranks"), (8, "num_heads is 4, and 8 ranks")])
def test_tensor_parallel_ranks_divide_the_heads(role: str, ranks: int, said: str):
    found = the_problem("quickstart", *cut(ranks, **{role: f", tensor_parallel: {ranks}"}))
    assert found.startswith(f"roles.{role}.tensor_parallel is {ranks}; model.shape.{said} must divide the heads")


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_tensor_parallel_ranks_divide_the_key_and_value_heads(role: str):
    found = the_problem("quickstart", *cut(4, **{role: ", tensor_parallel: 4"}))
    assert found == (
        f"roles.{role}.tensor_parallel is 4; model.shape.num_kv_heads is 2, and 4 ranks must divide them; pick a "
        "divisor of 2"
    )


@pytest.mark.parametrize(("engine", "does_fit"), [("vllm", True), ("huggingface", False)])
def test_only_an_engine_that_copies_key_and_value_heads_has_more_ranks_than_those(engine: str, does_fit: bool):
    found = problems("quickstart", *cut(4, rollout=", tensor_parallel: 4"), f"rollout.engine={engine}")
    assert (found == []) == does_fit, found


@pytest.mark.parametrize(("ranks", "does_fit"), [(2, True), (3, False), (4, True)])
def test_sequence_parallel_ranks_divide_the_heads(ranks: int, does_fit: bool):
    found = problems("quickstart", *cut(ranks, actor=f", sequence_parallel: {ranks}"))
    assert (found == []) == does_fit, found


def test_both_ways_of_cutting_divide_the_heads_together():
    found = the_problem("quickstart", *cut(8, actor=", tensor_parallel: 2, sequence_parallel: 4"))
    assert found.startswith("roles.actor.sequence_parallel is 4; model.shape.num_heads is 4, and 8 ranks must divide")


def test_a_critic_of_its_own_is_asked_for_its_own_heads():
    shape = "{num_layers: 1, hidden_size: 12, intermediate_size: 8, num_heads: 3, vocab_size: 100}"
    found = the_problem(
        "quickstart", *cut(2, critic=", tensor_parallel: 2"), f"critic.model={{build: tiny, shape: {shape}}}"
    )
    assert "critic.model.shape.num_heads is 3, and 2 ranks must divide the heads" in found


@pytest.mark.parametrize(
    ("role", "key"),
    [("reward", "tensor_parallel"), ("reward", "sequence_parallel"), ("rollout", "sequence_parallel")],
)
def test_a_size_that_a_role_does_not_read_is_refused(role: str, key: str):
    found = the_problem("quickstart", *cut(2, **{role: f", {key}: 2"}))
    assert found.startswith(f"roles.{role}.{key} is 2; only actor, critic, reference")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "model.shape.vocab_size=99",
            "model.shape.vocab_size is 99; the character tokenizer of model.build has 100 tokens",
        ),
        ("model.shape.head_width=33", "a head is 33 numbers wide"),
        ("model.shape.hidden_size=12", "a head is 3 numbers wide"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(change: str, said: str):
    assert said in the_problem("quickstart", change)
