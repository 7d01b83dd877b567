"""Settings that nothing of this run reads are told, each with its reason; what is read is not."""

import pytest

from configs.load import load_config
from configs.unread import unread_notes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algorithm.clip_ratio_dual=3", "algorithm.name=gspo"], "algorithm.clip_ratio_dual is set, and gspo does not"),
        (["critic.micro_batch_size=4"], "critic is set, and grpo has no critic"),
        (["algorithm.kl={coef: 0, target: 0.1}"], "algorithm.kl.target is set, and algorithm.kl.coef is 0"),
        (["algorithm.kl={coef: 0, place: loss}"], "algorithm.kl.place is set, and algorithm.kl.coef is 0"),
        (["algorithm.kl={coef: 0.1, horizon: 9}"], "algorithm.kl.horizon is set, and algorithm.kl.controller is fixed"),
        (["data.solved_score=0.5"], "data.solved_score is set, and data.curriculum is none"),
        (["rollout.gpu_memory_fraction=0.3"], "rollout.gpu_memory_fraction is set, and the pool of the rollout has no"),
        (["actor.optimizer={total_steps: 9}"], "actor.optimizer.total_steps is set, and the schedule is constant"),
        (["algorithm.correction={upper: 3.0}"], "algorithm.correction.upper is set, and nothing is corrected"),
        (["algorithm.dynamic_sampling={enabled: false, max_rounds: 9}"],
         "algorithm.dynamic_sampling.max_rounds is set, and algorithm.dynamic_sampling.enabled is not true"),
        (["rollout.servers.max_redispatches=5"],
         "rollout.servers.max_redispatches is set, and rollout.servers.enabled is false"),
        (["reward.graders.0.retries=9"], "reward.graders.0.retries is set, and on_failure is exclude"),
        (["recovery={enabled: false, snapshot_every: 7}"], "recovery.snapshot_every is set, and recovery.enabled is"),
        (["validation={every: 0, at_start: false, at_end: false, sources: [{name: v, kind: sorting, seed: 9}]}"],
         "validation.sources is set, and validation.every is 0, and neither at_start nor at_end is true"),
    ],
)  # fmt: skip
def test_a_setting_that_nothing_reads_is_told_with_the_reason(changes: list[str], said: str):
    notes = unread_notes(load_config("quickstart-grpo", changes))
    assert sum(note.startswith(said) for note in notes) == 1, notes


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["algorithm.kl={coef: 0.1, controller: adaptive, target: 0.1, horizon: 20480}"],
        ["data.curriculum=skip_solved", "data.solved_score=0.5"],
        ["actor.optimizer={schedule: linear, total_steps: 9}"],
        ["recovery.snapshot_every=7"],
        ["algorithm.correction={mode: icepop, upper: 3.0}"],
        ["algorithm.dynamic_sampling={enabled: true, max_rounds: 9}"],
        ["reward.graders.0.retries=9", "reward.graders.0.on_failure=retry"],
        ["recovery={enabled: false, snapshot_every: 1}"],
    ],
)
def test_a_setting_that_is_read_or_stands_at_its_default_is_not_told(changes: list[str]):
    assert unread_notes(load_config("quickstart-grpo", changes)) == []


def test_a_critic_that_the_algorithm_has_is_not_told():
    assert unread_notes(load_config("quickstart", ["critic.micro_batch_size=4"])) == []
