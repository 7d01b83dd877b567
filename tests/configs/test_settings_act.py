"""Settings that would silently do nothing, or tell something else than they say, are refused."""

import pytest

from tests.configs.test_rules import problems, the_problem

ONE_STEP = ["algorithm.num_ppo_epochs=1", "algorithm.num_mini_batches=1"]


def test_a_target_kl_with_no_second_step_to_leave_out_is_refused():
    said = the_problem("quickstart", "algorithm.target_kl=0.1", *ONE_STEP)
    assert said.startswith("algorithm.target_kl is 0.1; an iteration has one optimizer step")
    assert problems("quickstart", "algorithm.target_kl=0.1", ONE_STEP[0]) == []


def test_an_estimator_without_a_gradient_in_the_loss_is_refused():
    kl = "algorithm.kl={coef: 0.1, place: %s, estimator: %s}"
    assert the_problem("quickstart", kl % ("loss", "k1")) == (
        "algorithm.kl.estimator is 'k1'; in a loss the gradient of k1 is 0 on average, so that nothing would pull; "
        "use k1-straight-through, k2 or k3, or place: reward"
    )
    for place, estimator in (("reward", "k1"), ("loss", "k1-straight-through"), ("loss", "null")):
        assert problems("quickstart", kl % (place, estimator)) == []


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (["algorithm.kl.coef=0.1"], True),
        (["algorithm.kl={coef: 0.1, place: loss}"], False),
        (["algorithm.kl.coef=0.1", "distillation.task_reward_weight=0.5"], False),
        (["algorithm.kl.coef=0.1", "algorithm.name=reinforce_plus_plus", "distillation.task_reward_weight=0"], True),
        (["algorithm.kl.coef=0.1", "algorithm.name=reinforce_plus_plus"], False),
    ],
)
def test_a_kl_in_the_reward_of_a_task_without_weight_is_refused(settings: list[str], is_refused: bool):
    found = problems("quickstart-distillation", "roles.reference={pool: main}", *settings)
    assert found == [
        "algorithm.kl.place is 'reward'; a KL in the reward is a part of the task's advantages, whose "
        "distillation.task_reward_weight is 0; set it to loss, or give the task a weight"
    ] * is_refused  # fmt: skip


def test_a_lower_bound_that_a_rejection_does_not_read_is_refused():
    lower = "algorithm.correction.lower=0.5"
    said = the_problem("quickstart", "algorithm.correction.mode=reject-k3", lower)
    assert said.startswith("algorithm.correction.lower is 0.5; reject-k3 rejects what is above `upper`")
    assert problems("quickstart", "algorithm.correction.mode=reject-k1", lower) == []


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ("mode: icepop, upper: 0.5", "algorithm.correction.upper is 0.5; icepop rejects what is outside"),
        ("mode: reject-k1, lower: 1.2", "algorithm.correction.lower is 1.2; reject-k1 rejects what is outside"),
    ],
)
def test_a_band_that_would_reject_every_row_on_policy_is_refused(bounds: str, said: str):
    assert the_problem("quickstart", f"algorithm.correction={{{bounds}}}").startswith(said)


@pytest.mark.parametrize(
    "bounds", ["mode: icepop, lower: 1.0", "mode: reject-k1, upper: 1.0", "mode: token-truncate, upper: 0.5"]
)
def test_a_band_that_holds_what_is_on_policy_and_a_bound_that_rejects_nothing_are_not(bounds: str):
    assert problems("quickstart", f"algorithm.correction={{{bounds}}}") == []


AHEAD = ["pools.engines={nodes: [2], cpus_per_bundle: 2}", "roles.rollout={pool: engines}", "async_depth=2"]
MID_SAMPLING = ["rollout.servers={enabled: true, updates_while_sampling: true}", "rollout.weight_sync=object_store"]


@pytest.mark.parametrize(
    ("bound", "more", "is_refused"), [(0, [], True), (1, [], True), (2, [], False), (1, MID_SAMPLING, False)]
)
def test_a_bound_on_age_that_no_row_sampled_ahead_keeps_is_refused(bound: int, more: list[str], is_refused: bool):
    found = problems("quickstart-grpo", *AHEAD, f"algorithm.correction.max_staleness={bound}", *more)
    assert found == [
        f"algorithm.correction.max_staleness is {bound}; async_depth is 2, so that all rows but the first are as old, "
        "and none would be trained on; set it to 2 or more"
    ] * is_refused  # fmt: skip


def test_decoupled_ppo_is_not_corrected_twice():
    decoupled = "algorithm.name=decoupled_ppo"
    said = the_problem("quickstart", decoupled, "algorithm.correction.mode=icepop")
    assert said.startswith("algorithm.correction.mode is 'icepop'; decoupled_ppo weighs its loss")
    assert problems("quickstart", decoupled, "algorithm.correction.mode=off") == []


def test_a_curriculum_whose_prompts_cannot_be_solved_is_refused():
    curriculum = ["data.curriculum=skip_solved", "reward.clip=0.5"]
    assert "so that no prompt is ever solved; set it to 0.5 or less" in the_problem("quickstart", *curriculum)
    assert problems("quickstart", *curriculum, "data.solved_score=0.5") == []


PASS = ["algorithm.name=pass_at_k", "rollout.group_size=8"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], None),
        (["algorithm.kl={coef: 0.1, place: loss}"], None),
        (["algorithm.kl={coef: 0.1, place: reward}"], "algorithm.kl.place is 'reward'; pass@k compares a score with "),
        (
            ["reward.graders.0.weight=0.5"],
            "pass_threshold is 0.5; the best answer to source 'sorting' scores 0.5, so t",
        ),
        (["reward.graders.0.weight=0.5", "algorithm.pass_threshold=0.25"], None),
        (["reward.graders.0.weight=0.51"], None),
        (["reward.clip=0.5"], "pass_threshold is 0.5; scores are clipped to reward.clip = 0.5, so that no answer"),
        (["reward.clip=0.5", "algorithm.pass_threshold=0.4"], None),
    ],
)
def test_pass_at_k_whose_right_answers_count_as_wrong_is_refused(settings: list[str], said: str | None):
    found = problems("quickstart-grpo", *PASS, *settings)
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


def test_a_critic_built_here_is_no_reward_model():
    model = "critic.model={build: tiny, shape: {num_layers: 1, hidden_size: 8, intermediate_size: 8, num_heads: 1"
    said = the_problem("quickstart", f"{model}, vocab_size: 128}}}}", "critic.from_reward_model=true")
    assert said.startswith("critic.from_reward_model is true; critic.model is built here")


@pytest.mark.parametrize(("warmup", "is_refused"), [(340, True), (339, False)])
def test_a_schedule_that_ends_before_it_begins_is_refused(warmup: int, is_refused: bool):
    found = problems("quickstart", f"actor.optimizer.warmup_steps={warmup}")
    assert (found != []) == is_refused
    assert not is_refused or "warmup_steps is 340 and total_steps 340; the cosine schedule begins" in found[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["checkpoint.keep_best=validation/sampled_accuracy"], None),
        (["checkpoint.keep_best=reward/score_mean", "validation.every=0"], None),
        (["checkpoint.keep_best=validation/best_at_4/low", "validation.samples_per_prompt=4"], None),
        (["checkpoint.keep_best=validation/best_at_4"], "no validation of this run gives it; it gives ['validation/s"),
        (["checkpoint.keep_best=validation/accuracy", "validation.greedy=false"], "no validation of this run gives it"),
        (["checkpoint.keep_best=accuracy"], "metrics are named after validation, reward, rollout"),
        (["checkpoint.keep_best=validation/accuracy", "validation.every=0"], "validation.every is 0 and checkpoint.ev"),
        (["checkpoint.keep_best=validation/accuracy", "checkpoint.every=7"], "so that no iteration before the last of"),
    ],
)
def test_the_best_checkpoint_is_told_by_a_metric_that_some_checkpoint_has(settings: list[str], said: str | None):
    found = problems("quickstart", *settings)
    assert (found == []) == (said is None), found
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("held_out", "is_refused"),
    [
        ("{name: v, kind: json, path: rows.jsonl}", True),
        ("{name: v, kind: json, path: others.jsonl}", False),
        ("{name: v, kind: hub, path: gsm8k}", True),
        ("{name: v, kind: hub, path: gsm8k, split: test}", False),
        ("{name: v, kind: sorting, size: 256}", False),
    ],
)
def test_held_out_rows_are_not_those_of_training(held_out: str, is_refused: bool):
    training = "{name: a, kind: json, path: rows.jsonl}, {name: b, kind: hub, path: gsm8k}, {name: c, kind: sorting}"
    found = problems("quickstart", f"data.sources=[{training}]", f"validation.sources=[{held_out}]")
    assert (found != []) == is_refused, found
    assert not is_refused or found[0].startswith("validation.sources.0.path is ")
    assert not is_refused or "trains on these rows; name another file or split" in found[0]


def test_two_held_out_sources_of_one_name_are_refused():
    sources = "validation.sources=[{name: v, kind: sorting, size: 8}, {name: v, kind: calculator, size: 8}]"
    assert "sources are named ['v'] more than once" in the_problem("quickstart", sources)


@pytest.mark.parametrize(
    "kind", ["kind: reasoning_gym, path: gsm_symbolic", "kind: sorting", "kind: json, path: a.jsonl"]
)
def test_sources_whose_sizes_are_less_than_an_iteration_are_refused(kind: str):
    sources = f"data.sources=[{{name: a, {kind}, size: 500}}, {{name: b, kind: calculator, size: %d}}]"
    assert the_problem("quickstart", sources % 11) == (
        "data.prompts_per_iteration is 512; data.sources have 511 rows; add rows, or set it to at most 511"
    )
    assert problems("quickstart", sources % 12) == []


def test_held_out_sources_with_fewer_rows_than_are_validated_on_are_refused():
    said = the_problem("quickstart", "validation.sources=[{name: v, kind: sorting, size: 8}]")
    assert said.startswith("validation.num_prompts is 256; validation.sources have 8 rows; add rows")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pools.main={nodes: null}", "nodes is null and bundles is null; give exactly one of them"),
        ("model={path: null}", "path is null and build is null; give exactly one of them"),
        ("rollout.tools={environment_options: {a: null}}", "environment_options is {'a': null}, and environment"),
        ("rollout.engine=scripted", "engine is 'scripted' and scripted is missing"),
        ("reward.graders=[{name: j, kind: judge, judge: {}}]", "base_url and serve are both missing"),
        ("reward.graders=[]", "reward.graders is []; it must have at least 1 entries"),
        ("seed=null", "seed is null; it must be an integer"),
    ],
)
def test_values_are_told_as_a_config_writes_them(override: str, said: str):
    found = problems("quickstart", override)
    assert any(said in problem for problem in found), found
    assert not any(word in problem for problem in found for word in ("None", "()", "frozenset")), found
