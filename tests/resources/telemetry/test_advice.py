"""What a report recommends is something that the run's config would take."""

from pathlib import Path

import pytest

from configs.changes import CHANGES, refused_changes
from configs.load import load_config
from configs.problems import ConfigError
from resources.telemetry.advice import change_for
from resources.telemetry.causes import Cause
from resources.telemetry.report import build_report
from resources.telemetry.text_report import render_text
from tests.resources.telemetry.scenarios import iteration, run_record, write_run

FUSED = refused_changes(load_config("quickstart"))
SPLIT = refused_changes(load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools"))


@pytest.mark.parametrize("cause", [Cause.LONG_TAIL, Cause.BALANCED, Cause.SLOW_JUDGE, Cause.RARE_SLOW_GRADER])
def test_a_fused_rollout_is_told_to_run_ahead_only_on_a_pool_of_its_own(cause: Cause):
    assert "on a pool of its own (colocate: shared) with async_depth: 1" in change_for("rollout", cause, {}, FUSED)
    split = change_for("rollout", cause, {}, SPLIT)
    assert "async_depth: 1" in split
    assert "a pool of its own" not in split


MOVED = ("pools.engines.bundles=1", "roles.rollout.pool=engines", "roles.rollout.colocate=shared", "async_depth=1")
HYBRID = ("roles={actor_rollout: {pool: main}, critic: {pool: main}, reference: {pool: main}, reward: {pool: main}}",)
DUTIES = "roles={actor: {pool: main}, critic: {pool: main}, reference: {pool: main}, reward: {pool: main}}"


def test_the_advice_to_run_ahead_is_taken_by_the_config_when_it_is_followed_to_the_letter():
    assert "(colocate: shared) with async_depth: 1" in change_for("rollout", Cause.LONG_TAIL, {}, FUSED)
    assert load_config("quickstart", MOVED).async_depth == 1
    with pytest.raises(ConfigError, match="no other fused role stands in pool 'engines'"):
        load_config("quickstart", [change for change in MOVED if "colocate" not in change])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HYBRID, (DUTIES,)),
        (("rollout.weight_sync=in_process",), ()),
        ((*HYBRID, "rollout.weight_sync=in_process"), (DUTIES,)),
    ],
)
def test_what_has_to_change_beside_the_move_of_the_rollout_is_said(before: tuple[str, ...], after: tuple[str, ...]):
    refused = refused_changes(load_config("quickstart", before))
    said = change_for("rollout", Cause.LONG_TAIL, {}, refused)
    assert "a role of its own in place of a hybrid one" in said
    assert "rollout.weight_sync: auto and async_depth: 1" in said
    with pytest.raises(ConfigError):
        load_config("quickstart", (*before, *MOVED))
    assert load_config("quickstart", (*before, *after, *MOVED, "rollout.weight_sync=auto")).async_depth == 1


def test_a_curriculum_that_rules_out_running_ahead_is_told_nothing_of_it():
    refused = refused_changes(load_config("quickstart", ("data.curriculum=skip_solved",)))
    assert {"ahead", "ahead_apart"} <= set(refused)
    assert "async_depth" not in change_for("rollout", Cause.LONG_TAIL, {}, refused)


def test_one_process_is_told_of_no_process_group_and_two_are():
    assert "process_group" not in change_for("actor", Cause.WEIGHT_SYNC, {}, FUSED)
    assert "process_group" in change_for("actor", Cause.WEIGHT_SYNC, {}, SPLIT)


def test_no_key_is_recommended_that_the_config_does_not_have():
    assert "reference.micro" not in change_for("reference", Cause.UNEVEN_TOKENS, {})
    assert "rollout.micro" not in change_for("rollout", Cause.UNEVEN_TOKENS, {})
    assert "reference.fsdp" not in change_for("reference", Cause.COMMUNICATION, {})
    assert "tensor_parallel" not in change_for("reward", Cause.SLOW_REWARD_MODEL, {})
    assert "judge.max_concurrency" not in change_for("reward", Cause.SLOW_JUDGE, {"kind": "http"})


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("refused", [(), tuple(CHANGES)])
def test_every_recommendation_is_whole_without_its_refused_parts(cause: Cause, refused: tuple[str, ...]):
    said = change_for("actor", cause, {"path_share": 0.7, "rank": 1.0, "tasks": 9.0}, refused)
    assert said == said.strip(" ,;")
    assert ", ," not in said
    assert ";;" not in said


@pytest.mark.parametrize("refused", [FUSED, None])
def test_the_report_of_a_fused_run_does_not_recommend_async_depth_alone(
    refused: tuple[str, ...] | None, tmp_path: Path
):
    """None: a run of an older version, whose layout tells as much."""
    fused = dict.fromkeys(("actor", "rollout"), "fused")
    record = run_record(roles={"actor": "main", "rollout": "main"}, colocate=fused, refused=refused)
    write_run(tmp_path, [iteration(number, 10.0 * number) for number in range(4)], record)
    text = render_text(build_report(tmp_path), width=300)
    assert "or roles.rollout on a pool of its own (colocate: shared) with async_depth: 1" in text


def test_the_report_says_which_seconds_are_medians_and_which_are_means(tmp_path: Path):
    runs = [iteration(number, 20.0 * number, seconds={"reward": 4.0}) for number in range(4)]
    text = render_text(build_report(write_run(tmp_path, runs, run_record())), width=300)
    assert "step: median of all" in text
    assert "means of 3 iterations" in text
    assert "leave out the first of 4 iterations" in text
    assert "by role (mean of 4 iterations)" in text
