"""Deployments: the repository's own are accepted, and one goes from `prefect deploy` to a finished run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.load import dump_config, load_config
from configs.run import RunConfig
from resources.prefect_server import PrefectServer
from resources.run_directory import read_lines
from tests.interrupts import heed_interrupts

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

TINY_FLOW = """
import sys
sys.path.insert(0, {root!r})
from configs.environment import apply_defaults
apply_defaults()
import ray
from prefect import flow
from pydantic import BaseModel, ConfigDict, Field
from tasks.api import check_from_nodes
from tasks.collect import collect
from tasks.hosts import start_hosts
from tasks.runner import PoolTaskRunner
from tasks.step import StepResult, step


class Tiny(BaseModel):
    model_config = ConfigDict(extra="forbid")
    iterations: int = Field(gt=0)


@step(role="rollout")
def rollout(policy_version: int) -> StepResult:
    return StepResult()


@flow(name="iteration", flow_run_name="iteration-{{iteration:04d}}", task_runner=PoolTaskRunner())
def iteration(iteration: int):
    collect([rollout.submit(policy_version=iteration)], 120)


@flow(name="tiny")
def tiny(config: Tiny):
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    check_from_nodes()
    with start_hosts(run_id="tiny", role_pools={{"rollout": "main"}}, steps=[rollout]):
        for number in range(config.iterations):
            iteration(number)
    ray.shutdown()
"""
TINY_YAML = """
name: tiny
deployments:
- name: local
  entrypoint: tiny.py:tiny
  pull:
  - prefect.deployments.steps.set_working_directory: {{directory: {directory}}}
  parameters: {{config: {{iterations: 2}}}}
  work_pool: {{name: tiny}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    home = tmp_path_factory.mktemp("deployments")
    with PrefectServer(home, flush_seconds=1) as started, temporary_settings({PREFECT_API_URL: started.api_url}):
        yield started


def prefect(server: PrefectServer, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run Prefect's own command as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *words],
        env=environment(server), cwd=cwd, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@contextmanager
def process_worker(server: PrefectServer, pool: str, cwd: Path) -> Iterator[None]:
    """A Prefect worker that starts the pool's flow runs as processes."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--limit", "1"],
        env=environment(server), cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,  # it ends on SIGTERM by interrupting itself
    )  # fmt: skip
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(60)


def environment(server: PrefectServer) -> dict[str, str]:
    return {**os.environ, "PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(server.home / "client")}


def test_the_deployments_hold_their_whole_preset_and_offer_a_form(server: PrefectServer):
    prefect(server, "work-pool", "create", "callsheet", "--type", "process")
    deployed = prefect(server, "deploy", "--all")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with get_client(sync_client=True) as client:
        for name in ("quickstart", "quickstart-grpo"):
            deployment = client.read_deployment_by_name(f"ppo/{name}")
            expected = json.loads(json.dumps(dump_config(load_config(name))))
            assert deployment.parameters["config"] == expected
            assert RunConfig.model_validate(deployment.parameters["config"]).name == load_config(name).name
            assert deployment.entrypoint == "flows/ppo.py:ppo"
            assert deployment.pull_steps[0]["prefect.deployments.steps.set_working_directory"] == {
                "directory": str(ROOT)
            }
            form = deployment.parameter_openapi_schema["definitions"]["RunConfig"]
            assert {"iterations", "model", "pools", "roles"} <= set(form["properties"])
            assert form["additionalProperties"] is False


SHORT = (
    "iterations=2",
    "data.prompts_per_iteration=32",
    "algorithm.num_mini_batches=2",
    "sft.steps=4",
    "validation.num_prompts=16",
    "checkpoint.every=1",
)


def test_the_shipped_deployment_trains_through_a_process_worker(server: PrefectServer, tmp_path: Path):
    """`ppo/quickstart` as it is deployed, vLLM included, with less of everything: `callsheet train` does no more."""
    prefect(server, "work-pool", "create", "callsheet", "--type", "process")
    deployed = prefect(server, "deploy", "--name", "quickstart")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    config = load_config("quickstart", [*SHORT, f"run_dir={tmp_path}", "name=deployed"])
    with process_worker(server, "callsheet", ROOT):
        done = prefect(
            server, "deployment", "run", "ppo/quickstart", "--watch", "--watch-interval", "1", "--watch-timeout", "400",
            "--param", f"config={json.dumps(dump_config(config))}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert [line["iteration"] for line in read_lines(tmp_path / "deployed" / "metrics.jsonl")] == [0, 1]
    with get_client(sync_client=True) as client:
        runs = {run.name: run.state_name for run in client.read_flow_runs()}
    assert {runs["deployed"], runs["iteration-0000"], runs["iteration-0001"]} == {"Completed"}


def test_a_deployment_runs_from_deploy_to_done_and_refuses_a_wrong_value(server: PrefectServer, tmp_path: Path):
    (tmp_path / "tiny.py").write_text(TINY_FLOW.format(root=str(ROOT)))
    (tmp_path / "prefect.yaml").write_text(TINY_YAML.format(directory=tmp_path))
    prefect(server, "work-pool", "create", "tiny", "--type", "process")
    deployed = prefect(server, "deploy", "--all", cwd=tmp_path)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with process_worker(server, "tiny", tmp_path):
        done = prefect(
            server, "deployment", "run", "tiny/local", "--watch", "--watch-interval", "1", "--watch-timeout", "400"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        wrong = prefect(server, "deployment", "run", "tiny/local", "--param", 'config={"iterations": 0}')
        assert wrong.returncode == 1
        assert "config.iterations" in wrong.stdout + wrong.stderr
    with get_client(sync_client=True) as client:
        runs = {run.name: run for run in client.read_flow_runs()}
        assert {runs[f"iteration-000{number}"].state_name for number in range(2)} == {"Completed"}
        for _ in range(50):
            names = [row.name for row in client.read_task_runs()]
            if names.count("rollout/main/v0") == names.count("rollout/main/v1") == 1:
                break
            time.sleep(0.2)
        assert {"rollout/main/v0", "rollout/main/v1"} <= set(names)
