"""Rollout servers through the whole flow: an agent behind OpenAI's API, an engine that dies, weights that change."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import flow

from configs.run import RunConfig
from flows.ppo import ppo
from resources.node_resources import parse_nodes
from resources.run_directory import read_lines
from resources.samples import read_samples_of, sample_files
from tasks.rebuild import _move, _start_missing
from tasks.run_folder import open_directory
from tasks.session import current_session, open_session
from tasks.shrink import shrink
from tasks.watchers import Progress, watching
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

SCRIPT = {"mode": "random", "min_length": 20, "max_length": 20, "by_token": True}


def served(
    run_dir: Path, name: str, *overrides: str, script: dict[str, Any] | None = None, depth: int = 0
) -> RunConfig:
    """Two engines on a pool of their own, everything else on another."""
    return small_config(
        f"name={name}", f"run_dir={run_dir}", "sft=null", "checkpoint.every=0", "validation.every=0",
        "validation.at_start=false", "validation.at_end=false", "rollout.servers.enabled=true",
        "pools={main: {nodes: [1], cpus_per_bundle: 2}, engines: {nodes: [2]}}", "rollout.max_response_length=20",
        "roles.rollout={pool: engines, workers: 2, threads: 1}", "algorithm.name=grpo", "algorithm.kl.coef=0.0",
        *overrides, script=script,
    )  # fmt: skip


def lines(config: RunConfig, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return list(read_lines(Path(config.run_dir) / config.name / name))


def test_an_agent_with_a_stock_client_plays_the_episodes_that_are_trained_on(tmp_path: Path):
    config = served(
        tmp_path, "agent", "iterations=2", "rollout.engine=huggingface", "rollout.scripted=null",
        "model.shape.hidden_size=32",
        "rollout.servers.agent=tests.resources.agents_here:ask",
        "algorithm.correction.mode=token-truncate",
        "reward.graders=[{name: agent, kind: rule, function: environment_score}]",
    )  # fmt: skip
    assert ppo(config)["iterations"] == 2
    metrics = lines(config)
    assert [line["rollout/failed_episodes"] for line in metrics] == [0.0, 0.0]
    assert [line["rollout/calls_mean"] for line in metrics] == [1.0, 1.0]
    assert [line["rollout/rows"] for line in metrics] == [32.0, 32.0]
    assert metrics[-1]["actor/grad_norm"] > 0.0  # an untrained model hits nothing in the first one
    assert all("rollout/probe_gap" in line for line in metrics)
    files = sample_files(Path(config.run_dir) / config.name / "samples")
    assert [{row["policy_version"] for row in read_samples_of(path)} for path in files.values()] == [{0}, {1}]
    # The engines' log-probs are the actor's: they sampled with these very weights, through the client.
    assert all(line["rollout/log_prob_gap"] < 1e-3 for line in metrics)


def test_a_run_on_servers_that_is_resumed_with_other_data_begins_it_anew_and_says_so(tmp_path: Path):
    config = served(
        tmp_path, "resumed", "iterations=1", "rollout.engine=huggingface", "rollout.scripted=null",
        "validation.every=1",
    )  # fmt: skip
    # Bringing the weights to the engines measures something too, before the first iteration.
    summary = ppo(config)
    [line] = lines(config)
    assert summary["accuracy_before"] == summary["accuracy_after"] == line["validation/accuracy"]

    path = tmp_path / "resumed" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["iterations"] = 3
    stored["data"]["sources"][0]["seed"] += 1
    path.write_text(yaml.safe_dump(stored))
    ppo(config, str(tmp_path / "resumed"))
    changed = [event for event in lines(config, "events.jsonl") if event["kind"] == "data-changed"]
    assert [(event["before"]["start"], event["epoch"], event["start"]) for event in changed] == [(8, 0, 0)]


def test_a_replica_that_a_smaller_pool_has_no_place_for_is_gone_from_the_run(tmp_path: Path):
    config = served(
        tmp_path, "smaller", "pools.engines={bundles: 3}", "roles.rollout.workers=3", "recovery.allow_smaller=true",
        "rollout.scripted.seconds_per_token=0", script=SCRIPT,
    )  # fmt: skip

    @flow
    def lose_a_bundle() -> None:
        config_left, directory = open_directory(config, None)
        with open_session(config_left, directory) as run:
            run.cast()
            names.append(sorted(run.groups))
            run.config = shrink(run.config, {"engines"}, parse_nodes("(cpu=2)"))
            _move(run, {"engines"})
            assert set(_start_missing(run)) == {"rollout.0", "rollout.1"}
            names.append(sorted(run.groups))
        directory.release()

    names: list[list[str]] = []
    lose_a_bundle()
    before, after = names
    assert {"rollout.0", "rollout.1", "rollout.2"} < set(before)
    assert after == [name for name in before if name != "rollout.2"]


def test_an_engine_that_dies_under_load_costs_an_iteration_and_no_request(tmp_path: Path):
    """Its requests go to the other one; the step that then needs it finds it dead, and it comes back."""
    config = served(
        tmp_path, "killed", "iterations=2", "rollout.scripted.seconds_per_token=0.3", "recovery.backoff_seconds=0",
        script=SCRIPT,
    )  # fmt: skip
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.iteration == 0:
            pid = current_session().groups["rollout.0"].ranks[0]["pid"]
            threading.Timer(3.0, lambda: (killed.append(pid), os.kill(pid, signal.SIGKILL))).start()

    with watching(kill):
        assert ppo(config)["iterations"] == 2
    assert killed
    recovered = [event for event in lines(config, "events.jsonl") if event["kind"] == "recovered"]
    assert [event["rebuilt"] for event in recovered] == [["group rollout.0"]]
    rows = [read_samples_of(path) for path in sample_files(Path(config.run_dir) / config.name / "samples").values()]
    assert [len({row["row_id"] for row in own}) for own in rows] == [32, 32]
    assert [line["rollout/lost_rows"] for line in lines(config)] == [0.0, 0.0]


def test_weights_change_under_a_rollout_that_runs_ahead_and_its_tokens_keep_their_versions(tmp_path: Path):
    settings = ("iterations=2", "rollout.scripted.seconds_per_token=1.0", "data.prompts_per_iteration=4")
    config = served(
        tmp_path, "partial", *settings, "rollout.servers.updates_while_sampling=true", "async_depth=1", script=SCRIPT
    )
    assert ppo(config)["iterations"] == 2
    metrics = lines(config)
    # The first two rollouts began with version 0; the second one met version 1 on its way.
    assert metrics[0]["rollout/updated_fraction"] == 0.0
    assert metrics[1]["rollout/updated_fraction"] == 1.0
    assert all(line["rollout/lost_rows"] == 0.0 and line["rollout/rows"] == 16 for line in metrics)
    assert all(line["rollout/response_length_mean"] == 20.0 for line in metrics)
    assert max(line["rollout/staleness/max"] for line in metrics) == 1.0
