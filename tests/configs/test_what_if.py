"""A what-if's changes on a run's config: refused where its rules refuse them, and nowhere else."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.whatif import LAYOUTS, ROWS
from configs.layout import duties, styles
from configs.load import load_config, preset_names
from configs.what_if import pinned_workers, problems_of_changes

SPLIT_POOLS = "gsm8k-qwen2.5-1.5b-8gpu-split-pools"
APART = {"pools.engines": "1", "roles.rollout.pool": "engines"}
HYBRID = (
    "pools={main: {nodes: [1], accelerator: gpu, cpus_per_bundle: 2}, values: {bundles: 1}}",
    # the whole accelerator: reference and actor as processes of their own would not fit it
    "roles={actor_rollout_reference: {pool: main, fraction: 1.0}, critic: {pool: values}, reward: {pool: main}}",
)
DUTIES = ("actor", "rollout", "reference")


def said(source: str, changes: Mapping[str, str], *overrides: str) -> list[str]:
    return [str(problem) for problem in problems_of_changes(load_config(source, overrides), changes)]


@pytest.mark.parametrize("name", preset_names())
def test_an_unchanged_preset_is_not_refused(name: str):
    config = load_config(name)
    same = {f"pools.{pool}.bundles": str(given.size) for pool, given in config.pools.items()}
    same |= {f"roles.{duty}.pool": config.roles[role].pool for duty, role in duties(config).items()}
    same |= {f"roles.{duty}.colocate": style for duty, style in styles(config).items()}
    same |= {
        "async_depth": str(config.async_depth),
        "data.prompts_per_iteration": str(config.data.prompts_per_iteration),
        "rollout.group_size": str(config.rollout.group_size),
        "cores": "2",
    }
    assert said(name, {}) == said(name, same) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_no_change_that_the_benchmark_then_makes_is_refused(
    row: tuple[str, str, str, Mapping[str, str]], tmp_path: Path
):
    _, source, _, changes = row
    assert problems_of_changes(LAYOUTS[source].config(tmp_path, 8), changes) == []


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("quickstart", {"pools.main.bundles": "8", "data.prompts_per_iteration": "4096", "cores": "16"}),
        ("quickstart", {"rollout.group_size": "16"}),
        ("quickstart", {**APART, "roles.rollout.colocate": "shared", "async_depth": "1"}),
        ("quickstart", {**APART, "pools.engines": "2", "roles.rollout.colocate": "split"}),
        ("quickstart", {**APART, "roles.critic.pool": "engines"}),  # two fused pairs
        ("quickstart", {"pools.graders": "4", "roles.reward.pool": "graders"}),
        ("quickstart", {"pools.graders": "1", "roles.advantage.pool": "graders"}),
        ("quickstart-distillation", {"roles.teacher.pool": "main", "roles.teacher.colocate": "shared"}),
        (SPLIT_POOLS, {"pools.generation": "6", "pools.training": "1", "pools.values": "1"}),
        (SPLIT_POOLS, {"roles.reference.pool": "values", "roles.critic.colocate": "shared"}),
        (SPLIT_POOLS, {"pools.scoring": "3", "roles.reward.pool": "scoring", "roles.reference.pool": "scoring"}),
        (
            SPLIT_POOLS,
            {"async_depth": "2", "rollout.max_running_sequences": "64", "roles.rollout.tensor_parallel": "2"},
        ),
    ],
)
def test_a_layout_that_the_config_would_take_is_not_refused(source: str, changes: Mapping[str, str]):
    assert said(source, changes) == []


@pytest.mark.parametrize(
    ("source", "changes", "why"),
    [
        ("quickstart", {"data.prompts_per_iteration": "3"}, "3 x 1 = 3 rows do not divide by it"),
        ("quickstart", {"data.prompts_per_iteration": "1000000"}, "data.sources have 20000 rows"),
        ("quickstart", {"data.prompts_per_iteration": "32768", "pools.main": "64"}, "data.sources have 20000 rows"),
        ("quickstart-grpo", {"rollout.group_size": "1"}, "grpo needs at least 2"),
        ("quickstart", {"pools.main": "256"}, "a mini-batch then has 128 rows for the 256 data-parallel ranks"),
        ("quickstart", {"pools.main": "8", "roles.rollout.tensor_parallel": "8"}, "has 4 attention heads"),
        ("quickstart", {"async_depth": "1"}, "give rollout a pool of its own and colocate: shared"),
        (SPLIT_POOLS, {"roles.critic.pool": "training"}, "together more than 1 or nothing left"),
        (SPLIT_POOLS, {"roles.reference.pool": "graders"}, "pool 'graders' has no accelerator to share"),
    ],
)
def test_a_layout_that_the_config_would_refuse_is_told_with_its_rule(source: str, changes: Mapping[str, str], why: str):
    assert why in said(source, changes)[0] + said(source, changes)[-1]


def test_a_role_that_is_fused_with_nobody_is_told_to_be_shared_and_then_taken():
    (problem,) = said("quickstart", {**APART, "async_depth": "1"})
    assert problem.startswith("roles.rollout.colocate is 'fused'; no other fused role stands in pool 'engines'")
    assert problem.endswith("also set roles.rollout.colocate=shared")
    both = said("quickstart-distillation", APART)  # the actor is left alone, too
    assert [one.split(" ")[0] for one in both] == ["roles.actor.colocate", "roles.rollout.colocate"]
    assert all(one.endswith("also set roles.rollout.colocate=shared") for one in both)
    assert said("quickstart-distillation", {**APART, "roles.rollout.colocate": "shared"}) == []


def test_a_style_that_was_asked_for_is_not_answered_with_another():
    (problem,) = said("quickstart", {"roles.reward.colocate": "split"})
    assert "pool 'main' also holds" in problem
    assert "also set" not in problem


@pytest.mark.parametrize("sync", ["auto", "in_process"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        APART,
        {**APART, "roles.rollout.colocate": "shared", "async_depth": "1"},
        {"pools.engines": "4", **{f"roles.{duty}.pool": "engines" for duty in DUTIES}},
        {f"roles.{duty}.colocate": "fused" for duty in DUTIES},
    ],
)
def test_a_hybrid_role_is_split_where_a_duty_leaves_it_and_else_kept(changes: Mapping[str, str], sync: str):
    assert said("quickstart", changes, *HYBRID, f"rollout.weight_sync={sync}") == []


def test_a_hybrid_role_that_keeps_its_duties_cannot_run_ahead():
    (problem,) = said("quickstart", {"async_depth": "1"}, *HYBRID)
    assert "give each duty of actor_rollout_reference a role of its own" in problem


def test_a_sync_in_the_process_becomes_another_where_actor_and_rollout_part():
    changes = {**APART, "roles.rollout.colocate": "shared"}
    assert said("quickstart", changes, "rollout.weight_sync=in_process") == []
    apart = ("roles.rollout={pool: engines}", "pools.engines.bundles=1", "rollout.weight_sync=process_group")
    assert said("quickstart", {"roles.rollout.pool": "main", "roles.rollout.colocate": "fused"}, *apart) == []


def test_workers_that_the_config_sets_below_a_pools_new_size_are_told():
    config = load_config("quickstart")
    notes = pinned_workers(config, {"pools.main.nodes": "[2, 2]"})
    assert notes[0] == (
        "roles.actor.workers is 1 in the run's config; the prediction is for 4, so leave it out there, or set it so"
    )
    assert pinned_workers(config, {"pools.main": "1"}) == pinned_workers(config, {"async_depth": "1"}) == []


def test_workers_follow_a_pool_that_grows_and_fused_neighbours_that_do_not():
    grown = ("roles.critic.colocate=shared", "roles.critic.workers=1")
    assert said("quickstart", {"pools.main": "3", "data.prompts_per_iteration": "516"}, *grown) == []
    half = ("pools.main={bundles: 2}", "roles.rollout={pool: engines}", "pools.engines.bundles=1")
    assert said("quickstart", {"roles.rollout.pool": "main", "roles.rollout.colocate": "fused"}, *half) == []
