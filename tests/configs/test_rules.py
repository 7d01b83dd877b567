"""Rules between sections. Each test breaks one rule of a preset that keeps them all, and reads what is said."""

import pytest

from configs.load import load_config
from configs.problems import ConfigError


def problems(source: str, *overrides: str) -> list[str]:
    try:
        load_config(source, overrides)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def the_problem(source: str, *overrides: str) -> str:
    found = problems(source, *overrides)
    assert len(found) == 1, found
    return found[0]


SHARED = [
    "pools.main={nodes: [1], accelerator: gpu, cpus_per_bundle: 8}",
    "roles.actor={pool: main}",
    "roles.rollout={pool: main}",
    "roles.reference={pool: main}",
    "algorithm.name=grpo",
    "rollout.group_size=4",
]
"""Three model roles as processes of their own on one GPU."""


@pytest.mark.parametrize(
    ("share", "does_fit"), [("0.34", False), ("0.3333333", True), ("0.3", True), ("0.33334", True)]
)
def test_three_shares_of_a_device_add_up_to_at_most_one(share: str, does_fit: bool):
    shares = [f"roles.{role}.fraction={share}" for role in ("actor", "rollout", "reference")]
    found = problems("quickstart", *SHARED, *shares)
    assert (found == []) == does_fit, found
    assert does_fit or "1.02" in found[0]


def test_a_share_of_one_leaves_nothing_for_a_neighbour():
    assert "nothing left for one of them" in the_problem("quickstart", *SHARED, "roles.actor.fraction=1.0")


def test_a_tenth_and_nine_tenths_fill_a_device():
    fused = ["roles.reference={pool: main, colocate: fused}", "roles.rollout={pool: main, colocate: fused}"]
    shares = ["roles.actor.fraction=0.1", "roles.rollout.fraction=0.9"]
    assert problems("quickstart", *SHARED, *fused, *shares) == []


def test_cpus_of_a_bundle_are_not_overfilled():
    said = the_problem("quickstart", "roles.reward.cpus=2.5")
    assert said.startswith("pools.main.cpus_per_bundle is 2")
    assert "reward 2.5" in said


def test_more_processes_than_slots_are_refused():
    said = the_problem("quickstart", *SHARED, "pools.main.colocated_groups=4")
    assert said.startswith("pools.main.colocated_groups is 4; bundle 0 holds 5 processes")


def test_a_role_in_no_pool_is_refused():
    assert "roles.actor.pool is 'mian'; there is no such pool; pools are ['main']" in problems(
        "quickstart", "roles.actor.pool=mian"
    )


def test_a_pool_without_a_role_is_refused():
    said = the_problem("quickstart", "pools.spare={nodes: [1]}")
    assert said == "pools.spare is []; no role stands in it; remove the pool and its roles, or give it another role"


def test_a_pool_whose_only_role_is_not_needed_is_refused():
    moved = ["pools.values={nodes: [1]}", "roles.critic={pool: values}", "algorithm.name=grpo", "rollout.group_size=4"]
    assert "algorithm grpo does not need ['critic']" in the_problem("quickstart", *moved)


def test_a_critic_that_is_not_needed_may_stay_in_a_pool_with_others():
    assert problems("quickstart", "algorithm.name=grpo", "rollout.group_size=4") == []


def test_ppo_without_a_critic_is_refused():
    said = the_problem("quickstart-grpo", "algorithm.name=ppo")
    assert said == "roles.critic is missing; algorithm ppo learns values, which needs this role; add roles.critic.pool"


def test_a_kl_without_a_reference_is_refused():
    without = ["roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: main}, critic: {pool: main}}"]
    assert "roles.reference is missing; algorithm.kl.coef is 0.005" in the_problem("quickstart", *without)
    assert problems("quickstart", *without, "algorithm.kl.coef=0.0") == []


def test_a_duty_with_two_roles_is_refused():
    assert problems("quickstart", "roles.actor_rollout={pool: main}") == [
        "roles is ['actor', 'actor_rollout']; both do the duty 'actor'; name it once",
        "roles is ['rollout', 'actor_rollout']; both do the duty 'rollout'; name it once",
    ]


def test_fused_roles_with_unequal_workers_are_refused():
    found = problems("quickstart", "pools.main.nodes=[2]", "roles.actor.workers=2")
    assert len(found) == 3
    assert found[0].startswith("roles.rollout.workers is 1; it is fused with actor, which has 2")


def test_fused_roles_with_two_thread_counts_are_refused():
    said = the_problem("quickstart", "roles.actor.threads=2", "roles.critic.threads=1")
    assert "roles.critic.threads is [1, 2]; it is fused with actor" in said


def test_a_split_role_with_a_neighbour_is_refused():
    said = the_problem("quickstart", "roles.critic={pool: main, colocate: split}")
    assert said.startswith(
        "roles.critic.colocate is 'split'; pool 'main' also holds ['actor', 'rollout', 'reference', 'reward']"
    )


def test_workers_that_fill_bundles_unevenly_are_refused():
    said = the_problem("quickstart", "pools.main.nodes=[2]", "roles.reward.workers=3")
    assert "pool main has 2 bundles" in said


def test_tensor_parallel_must_divide_the_workers():
    split = [
        "pools.generation={nodes: [5], accelerator: gpu}",
        "roles.rollout={pool: generation, colocate: split, tensor_parallel: 4}",
    ]
    said = problems("quickstart", *split)
    assert said == [
        "roles.rollout.workers is 5; tensor_parallel x sequence_parallel is 4 and must divide it; use 4, or a smaller "
        "parallel size"
    ]


def test_tensor_parallel_peers_stay_on_one_node():
    split = [
        "pools.generation={nodes: [3, 1], accelerator: gpu}",
        "roles.rollout={pool: generation, colocate: split, tensor_parallel: 2}",
    ]
    assert "peers would sit on two nodes" in the_problem("quickstart", *split)


def test_a_share_of_a_pool_without_accelerator_is_refused():
    assert "has no accelerator to share" in the_problem("quickstart", "roles.reward.fraction=0.5")


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"])
def test_a_key_that_callsheet_sets_is_refused_in_a_roles_environment(key: str):
    said = the_problem("quickstart", f"roles.actor.env={{{key}: '1'}}")
    assert said.startswith(f"roles.actor.env.{key} is '1'; Callsheet sets this key")


def test_a_secret_in_a_roles_environment_is_refused_and_not_shown():
    said = the_problem("quickstart", "roles.actor.env={HF_TOKEN: hf_secret}")
    assert "hf_secret" not in said


@pytest.mark.parametrize(("name", "said"), [("GPU", "write gpu"), ("cpu", "that is no accelerator")])
def test_an_accelerator_by_a_wrong_name_is_refused(name: str, said: str):
    assert said in the_problem("quickstart", f"pools.main.accelerator={name}")


def test_a_lone_response_is_refused_where_siblings_are_compared():
    assert the_problem("quickstart", "algorithm.name=grpo").startswith(
        "rollout.group_size is 1; grpo needs at least 2, since a lone response has zero advantage"
    )
    assert "data.sources.0.group_size is 1" in the_problem("quickstart-grpo", "data.sources.0.group_size=1")


def test_pass_at_k_needs_k_responses():
    assert "algorithm.pass_k is 9" in the_problem("quickstart-grpo", "algorithm.name=pass_at_k", "algorithm.pass_k=9")


def test_rows_that_do_not_divide_name_the_nearest_counts_that_do():
    said = the_problem("quickstart", "algorithm.num_mini_batches=5")
    assert "512 x 1 = 512 rows do not divide by it; near values that do: [1, 2, 4, 8]" in said


def test_a_mini_batch_smaller_than_the_ranks_is_refused():
    wide = [
        "pools.main.nodes=[8]",
        *(f"roles.{role}.workers=8" for role in ("actor", "rollout", "reference", "critic")),
    ]
    found = problems("quickstart", *wide, "algorithm.num_mini_batches=128")
    assert len(found) == 2
    assert "4 rows for the 8 data-parallel ranks of the actor; use at most 64" in found[0]


def test_lengths_must_fit_engine_positions_and_micro_batch():
    found = problems(
        "quickstart", "rollout.max_response_length=64", "rollout.max_model_length=70", "actor.micro_batch_tokens=71"
    )
    assert [said.partition(" is ")[0] for said in found] == [
        "rollout.max_model_length", "model.shape.max_positions", "actor.micro_batch_tokens",
    ]  # fmt: skip
    assert all("8 + 64 = 72 tokens" in said for said in found)


def test_an_overlong_buffer_longer_than_the_maximum_is_refused():
    assert "the buffer lies inside the maximum" in the_problem(
        "quickstart", "algorithm.overlong={max_length: 5, buffer: 6}"
    )


def test_an_overlong_penalty_that_never_acts_is_refused():
    said = the_problem("quickstart", "algorithm.overlong={max_length: 20, buffer: 5}")
    assert "the penalty starts at 15, and no response passes 8" in said
    assert problems("quickstart", "algorithm.overlong={max_length: 8, buffer: 5}") == []


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("algorithm.kl.controller=adaptive", "algorithm.kl.controller"),
        ("algorithm.kl.refresh_every=5", "algorithm.kl.refresh_every"),
    ],
)
def test_kl_settings_without_a_kl_are_refused(override: str, path: str):
    assert the_problem("quickstart", "algorithm.kl.coef=0.0", override).startswith(path)


def test_a_critic_warmup_without_a_critic_or_without_an_end_is_refused():
    assert "has no critic" in the_problem("quickstart-grpo", "algorithm.critic_warmup_iterations=2")
    assert "would never learn" in the_problem("quickstart", "algorithm.critic_warmup_iterations=50")


def test_dynamic_sampling_needs_groups():
    assert "does not compare siblings" in the_problem("quickstart", "algorithm.dynamic_sampling.enabled=true")


def test_a_rollout_ahead_of_a_fused_actor_is_refused():
    assert the_problem("quickstart", "async_depth=1").startswith("async_depth is 1; rollout does the actor's work")
    assert problems("gsm8k-qwen2.5-1.5b-8gpu-split-pools", "async_depth=1") == []


def test_weight_sync_must_suit_the_processes():
    assert "processes of their own" in the_problem(
        "gsm8k-qwen2.5-1.5b-8gpu-split-pools", "rollout.weight_sync=in_process"
    )
    assert "cannot be two ranks" in the_problem("quickstart", "rollout.weight_sync=process_group")


def test_a_lora_run_has_its_reference_in_the_actor():
    said = the_problem("quickstart", "model.lora={rank: 4}")
    assert "the reference is the actor with its adapter off" in said


def test_teachers_without_a_role_and_a_role_without_teachers_are_refused():
    assert "roles.teacher is missing" in the_problem(
        "quickstart-distillation", "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: teachers}}"
    )
    assert "name at least one teacher" in problems("quickstart-distillation", "teachers=[]")[-1]


def test_a_teacher_of_another_vocabulary_is_refused():
    said = the_problem("quickstart-distillation", "teachers.0.model.shape.vocab_size=99")
    assert said.startswith("teachers.0.model.shape.vocab_size is 99; the student's is 128")


def test_distillation_without_its_section_is_refused():
    found = problems("quickstart", "algorithm.name=distillation")
    assert found[0].startswith("distillation is missing")


def test_an_environment_needs_its_role():
    said = the_problem("quickstart-tools", "rollout.tools.environment=reasoning_gym:sokoban")
    assert "roles.env is missing" in said


def test_a_grader_of_an_unknown_source_is_refused():
    found = problems("quickstart", "reward.graders.0.sources=[sortng]")
    assert found[0].startswith("reward.graders.0.sources is 'sortng'")
    assert sum("no grader scores this source" in said for said in found) == 2


def test_validation_on_nothing_is_refused():
    assert "validation.sources is empty" in the_problem("quickstart", "validation.sources=[]")


def test_a_key_in_place_of_its_name_is_refused_and_not_shown():
    judge = "{name: judge, kind: judge, judge: {base_url: 'http://u:p@h/v1', model: m, api_key_env: sk-1234}}"
    found = problems("quickstart", f"reward.graders=[{judge}]")
    assert len(found) == 2
    assert not any("sk-1234" in said or "u:p" in said for said in found)


@pytest.mark.parametrize("path", ["my.rewards.score", "my.rewards:", "a b:c", "my/rewards.py:score"])
def test_an_import_path_that_names_no_function_is_refused(path: str):
    assert "package.module:name" in the_problem("quickstart", f"algorithm.loss='{path}'")


def test_sizes_of_a_local_cluster_are_refused_with_an_address():
    assert the_problem("quickstart", "ray.address='h:1'", "ray.num_cpus=3").startswith("ray.num_cpus is 3")


def test_all_breaches_are_told_together():
    found = problems("quickstart", "algorithm.num_mini_batches=5", "async_depth=2", "roles.reward.cpus=3")
    assert len(found) == 3


def test_a_horizon_that_could_turn_the_kl_coefficient_negative_is_refused():
    adaptive = ["algorithm.kl.controller=adaptive", "data.prompts_per_iteration=512", "rollout.group_size=1"]
    said = the_problem("quickstart", *adaptive, "algorithm.kl.horizon=102.4")
    assert said.startswith("algorithm.kl.horizon is 102.4; an iteration has 512 rows")
    assert problems("quickstart", *adaptive, "algorithm.kl.horizon=102.5") == []


def test_pass_at_k_needs_k_responses_of_every_source():
    said = the_problem(
        "quickstart-grpo", "algorithm.name=pass_at_k", "algorithm.pass_k=4", "data.sources.0.group_size=2"
    )
    assert said.startswith("algorithm.pass_k is 4; pass@k looks at k of data.sources.0.group_size = 2")


def test_a_stop_token_outside_the_vocabulary_is_refused():
    said = the_problem("quickstart", "rollout.sampling.stop_token_ids=[2, 128]")
    assert said.startswith("rollout.sampling.stop_token_ids: [128] are in no response: model.shape.vocab_size is 128")
    assert problems("quickstart", "rollout.sampling.stop_token_ids=[127]") == []


@pytest.mark.parametrize("path", ["rollout.sampling.temperature", "validation.temperature"])
def test_a_temperature_that_an_engine_would_raise_without_a_word_is_refused(path: str):
    assert the_problem("quickstart", f"{path}=0.009").startswith(f"{path} is 0.009; ")
    assert problems("quickstart", f"{path}=0.01") == []


def test_a_system_prompt_without_a_template_to_hold_it_is_refused():
    said = the_problem("quickstart", "data.system_prompt=be brief")
    assert said.startswith("data.system_prompt is 'be brief'; data.chat_template is false")


def test_import_paths_of_held_out_prompts_and_environments_are_looked_at_too():
    held_out = "validation.sources=[{name: v, kind: python, path: my_rows}]"
    assert the_problem("quickstart", held_out).startswith("validation.sources.0.path is 'my_rows'; an import path is")
    env = ["rollout.tools={environment: chess}", "roles.env={pool: main}"]
    assert the_problem("quickstart", *env).startswith("rollout.tools.environment is 'chess'; an import path is")
