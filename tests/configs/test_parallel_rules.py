"""Rules about cutting a model over ranks, and about adapters: each test asks for one thing that no worker could do."""

import pytest

from configs.load import load_config
from configs.parallel_rules import CPU_HEAD_SIZES, shape_problems
from tests.configs.test_rules import problems, the_problem

WITH_ADAPTERS = ["model.lora={}", "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: main}}"]
"""The actor with its adapters off is the reference."""


def cut(role: str, **sizes: int) -> list[str]:
    """The role as two processes of its own, cut along `sizes`; the model has 4 heads of width 32."""
    given = "".join(f", {key}: {size}" for key, size in sizes.items())
    alone = [f"pools.{role}={{nodes: [2], cpus_per_bundle: 2}}", f"roles.{role}={{pool: {role}{given}}}"]
    return alone


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
@pytest.mark.parametrize("key", ["tensor_parallel", "sequence_parallel"])
def test_a_role_that_trains_or_scores_can_be_cut_both_ways(role: str, key: str):
    assert problems("quickstart", *cut(role, **{key: 2})) == []


def test_engines_are_not_cut_along_sequences_since_rows_would_be_lost():
    assert the_problem("quickstart", *cut("rollout", sequence_parallel=2)) == (
        "roles.rollout.sequence_parallel is 2; rollout is not cut that way; actor, critic, reference are; set it to 1"
    )
    assert problems("quickstart", *cut("rollout", tensor_parallel=2)) == []


def test_a_process_that_also_samples_is_not_cut_along_sequences():
    hybrid = "{pool: main, workers: 2, sequence_parallel: 2}"
    roles = f"roles={{actor_rollout: {hybrid}, reward: {{pool: main, workers: 2}}}}"
    said = the_problem("quickstart-grpo", "algorithm.kl.coef=0", "pools.main={nodes: [2], cpus_per_bundle: 4}", roles)
    assert said.startswith("roles.actor_rollout.sequence_parallel is 2; rollout is not cut that way")


@pytest.mark.parametrize("key", ["tensor_parallel", "sequence_parallel"])
def test_graders_are_not_cut(key: str):
    assert f"roles.reward.{key} is 2; reward is not cut" in the_problem("quickstart", *cut("reward", **{key: 2}))


def test_only_vllm_is_cut_along_tensors():
    said = the_problem("quickstart", *cut("rollout", tensor_parallel=2), "rollout.engine=huggingface")
    assert said.startswith("roles.rollout.tensor_parallel is 2; rollout.engine is 'huggingface', which runs whole")


def test_tensor_parallelism_needs_fsdp_and_no_adapters():
    halves = [*cut("actor", tensor_parallel=2), "pools.actor.nodes=[4]"]
    assert "actor.fsdp is false, and it lies under FSDP2" in the_problem("quickstart", *halves, "actor.fsdp=false")
    assert problems("quickstart", *cut("actor", tensor_parallel=2), "actor.fsdp=false") == []  # one rank of rows
    said = the_problem("quickstart-grpo", *WITH_ADAPTERS, *cut("actor", tensor_parallel=2))
    assert "model.lora is set, and adapters are not cut" in said


@pytest.mark.parametrize(
    ("role", "key", "kv_heads", "said"),
    [
        ("actor", "tensor_parallel", 1, "the model of the actor has 4 and 1 attention heads, which the ranks must"),
        ("critic", "tensor_parallel", 1, "the model of the critic has 4 and 1 attention heads"),
        ("actor", "sequence_parallel", 1, None),
        ("rollout", "tensor_parallel", 1, None),
        ("reference", "tensor_parallel", 2, None),
    ],
)
def test_ranks_divide_the_heads(role: str, key: str, kv_heads: int, said: str | None):
    found = problems("quickstart", *cut(role, **{key: 2}), f"model.shape.num_kv_heads={kv_heads}")
    assert (found == []) == (said is None), found
    assert said is None or said in found[0]


def test_both_ways_of_cutting_divide_the_heads_together():
    halves = [*cut("actor", tensor_parallel=2, sequence_parallel=4), "pools.actor.nodes=[8]"]
    found = the_problem("quickstart", *halves)
    assert found.startswith("roles.actor.sequence_parallel is 4; the model of the actor has 4 attention heads")


def test_a_critic_of_its_own_is_asked_for_its_own_heads():
    shape = "{num_layers: 1, hidden_size: 12, intermediate_size: 8, num_heads: 3, vocab_size: 100}"
    model = f"critic.model={{build: tiny, shape: {shape}, dtype: float32}}"
    found = problems("quickstart", *cut("critic", tensor_parallel=2), model)
    assert any("the model of the critic has 3 attention heads, which the ranks must divide" in one for one in found)


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
    assert any(said in one for one in problems("quickstart", change))


@pytest.mark.parametrize(("heads", "width"), [(8, 16), (2, 64), (4, 32)])
def test_heads_that_vllm_has_no_attention_for_on_a_cpu_are_refused(heads: int, width: int):
    found = problems("quickstart", f"model.shape.num_heads={heads}")
    assert (found == []) == (width in CPU_HEAD_SIZES), found
    if found:
        assert found[0].startswith("rollout.engine is 'vllm'; each attention head of model is 16 wide, and vLLM on a")
        assert problems("quickstart", f"model.shape.num_heads={heads}", "rollout.engine=huggingface") == []
        assert problems("quickstart", f"model.shape.num_heads={heads}", "pools.main.accelerator=gpu") == []


def test_the_heads_of_a_judge_that_the_run_serves_are_looked_at_too():
    shape = "{num_layers: 1, hidden_size: 16, intermediate_size: 16, num_heads: 1, vocab_size: 128}"
    judge = f"{{serve: {{build: tiny, shape: {shape}}}}}"
    said = the_problem("quickstart", f"reward.graders=[{{name: j, kind: judge, judge: {judge}}}]")
    assert said.startswith("reward.graders.0.judge.engine is 'vllm'; each attention head of reward.graders.0.judge.ser")


def test_shapes_that_were_read_from_a_folder_are_judged_as_given_ones():
    config = load_config("quickstart")
    narrow = config.model.shape.model_copy(update={"num_heads": 8})
    assert [problem.path for problem in shape_problems(config, {"model": narrow})] == ["rollout.engine"]


def test_dropout_in_adapters_is_refused_where_the_first_ratio_is_checked():
    lora = [*WITH_ADAPTERS, "model.lora.dropout=0.1"]
    said = the_problem("quickstart-grpo", *lora)
    assert said.startswith("model.lora.dropout is 0.1; log-probs are recomputed before the update")
    assert problems("quickstart-grpo", *lora, "algorithm.num_ppo_epochs=1", "algorithm.num_mini_batches=1") == []


def test_adapters_of_a_model_that_is_only_read_are_refused():
    model = "{path: /models/judge, lora: {rank: 4}}"
    said = the_problem("quickstart", f"reward.graders=[{{name: g, kind: model, model: {model}}}]")
    assert said.startswith("reward.graders.0.model.lora is 'given'; this model is only read")


def test_an_engine_without_an_accelerator_or_behind_servers_is_not_offloaded():
    assert the_problem("quickstart", "rollout.offload=true").startswith("rollout.offload is true; the engine works on")
    gpu = ["pools.main.accelerator=gpu", "rollout.offload=true"]
    assert problems("quickstart", *gpu) == []
    found = problems("quickstart", *gpu, "rollout.servers.enabled=true", "roles.rollout.colocate=shared")
    assert any(said.startswith("rollout.offload is true; servers take requests at any time") for said in found), found


@pytest.mark.parametrize("policy", ["truncate_left", "truncate_right", "filter", "error"])
def test_prompts_that_an_agent_would_be_given_whole_are_not_cut(policy: str):
    served = ["rollout.servers.enabled=true", "roles.rollout.colocate=shared", f"data.overlong_prompts={policy}"]
    assert not [said for said in problems("quickstart", *served) if "overlong_prompts" in said]
    found = problems("quickstart", *served, "rollout.servers.agent=my_project.agents:play")
    assert [said for said in found if "overlong_prompts" in said] == [
        f"data.overlong_prompts is '{policy}'; a cut is of token ids, and the agent is given the prompt's text, which "
        "would stay whole; set it to filter or error"
    ] * policy.startswith("truncate")


def test_flash_attention_is_refused_on_cpus_and_in_float32():
    flash = "model.attention=flash_attention_2"
    gpu = "pools.main.accelerator=gpu"
    said = the_problem("quickstart", flash)
    assert said.startswith("model.attention is 'flash_attention_2'; it is for accelerators and bfloat16, and here")
    assert "gpu and float32" in the_problem("quickstart", flash, gpu)
    assert problems("quickstart", flash, gpu, "model.dtype=bfloat16") == []
