"""The training flow on real Ray and Prefect: what it leaves behind, and that the layout changes no bit of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig
from flows.ppo import ppo
from resources.run_directory import read_lines
from resources.telemetry.report import build_report
from tests.flows.small_run import small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]


def split(run_dir: Path, name: str) -> RunConfig:
    """The same roles on three pools of one bundle each."""
    data = json.loads(json.dumps(small(run_dir, name).model_dump(mode="json")))
    data["pools"] = {pool: {"bundles": 1, "cpus_per_bundle": 1} for pool in ("train", "engines", "scoring")}
    pools = {"actor": "train", "critic": "train", "rollout": "engines", "reference": "scoring", "reward": "scoring"}
    data["roles"] = {role: {"pool": pool, "threads": 1} for role, pool in pools.items()}
    return RunConfig.model_validate(data)


def lines(config: RunConfig) -> list[dict[str, Any]]:
    """metrics.jsonl without what may differ between two runs of the same config."""
    path = Path(config.run_dir) / config.name / "metrics.jsonl"
    free = ("time/", "system/", "recovery/")
    return [{key: value for key, value in line.items() if not key.startswith(free)} for line in read_lines(path)]


@pytest.fixture(scope="module")
def fused_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = small(tmp_path_factory.mktemp("runs"), "fused", "roles.actor.threads=1")
    summary = ppo(config)
    assert summary["iterations"] == 2
    return config


def test_a_run_leaves_one_metrics_line_an_iteration(fused_run: RunConfig):
    found = lines(fused_run)
    assert [line["iteration"] for line in found] == [0, 1]
    wanted = {"reward/score_mean", "actor/policy_loss", "critic/explained_variance", "actor/reference_kl"}
    assert wanted <= set(found[0])
    assert "validation/accuracy" in found[-1]


def test_the_first_step_of_an_iteration_is_on_policy(fused_run: RunConfig):
    """Before any update the reference is the actor, so its KL is exactly 0."""
    assert lines(fused_run)[0]["actor/reference_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_run_ends_with_a_whole_checkpoint_of_every_stateful_role(fused_run: RunConfig):
    newest = Path(fused_run.run_dir) / fused_run.name / "checkpoints" / "iteration-000002"
    assert (newest / "manifest.json").is_file()
    assert {path.name for path in newest.iterdir() if path.is_dir()} >= {"actor", "critic"}


def test_every_step_of_the_dag_has_a_span(fused_run: RunConfig):
    report = build_report(Path(fused_run.run_dir) / fused_run.name)
    tasks = {
        row["task"] for row in read_lines(Path(fused_run.run_dir) / fused_run.name / "spans.jsonl") if "task" in row
    }
    assert len(report.complete) == 2
    assert tasks >= {
        "rollout", "reward", "actor-log-probs", "reference", "critic-values", "advantage", "actor-update",
        "critic-update", "weight-sync", "checkpoint", "validation",
    }  # fmt: skip


def test_spans_say_whose_ranks_they_are_of_and_how_many_engines_there_were(fused_run: RunConfig):
    rows = list(read_lines(Path(fused_run.run_dir) / fused_run.name / "spans.jsonl"))
    run = next(row for row in rows if row["record"] == "run")
    assert (run["rollout_engines"], run["rollout_tensor_parallel"]) == (1, 1)
    duties = {row["task"]: {rank.get("duty") for rank in row["ranks"]} for row in rows if row["record"] == "task"}
    assert duties["validation"] == {None, "reward"}
    assert duties["rollout"] == duties["reward"] == duties["actor-update"] == {None}


def test_three_pools_and_one_fused_pool_give_the_same_bits(fused_run: RunConfig, tmp_path: Path):
    config = split(tmp_path, "split")
    ppo(config)
    assert lines(config) == lines(fused_run)
