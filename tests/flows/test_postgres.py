"""The same runner on a Prefect server that keeps its rows in PostgreSQL."""

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from configs.training import PrefectConfig
from resources.prefect_server import free_port
from resources.prefect_supervisor import is_healthy
from tasks.api import prefect_api
from tasks.collect import collect
from tasks.hosts import start_hosts
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step
from tasks.subflow import call_iteration, iteration_run_name
from tests.interrupts import heed_interrupts

INITDB = next(Path("/usr/lib/postgresql").glob("*/bin/initdb"), None)
RUN_AS = "postgres" if os.getuid() == 0 else None


def _is_there() -> bool:
    return INITDB is not None and (RUN_AS is None or RUN_AS in {user.pw_name for user in pwd.getpwall()})


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _is_there(), reason="no PostgreSQL on this machine: apt-get install postgresql"),
]


@step(role="rollout")
def rollout(policy_version: int) -> StepResult:
    return StepResult()


@flow(flow_run_name=iteration_run_name, task_runner=ON_POOLS, persist_result=False)
def iteration(iteration: int, attempt: int):
    collect([rollout.submit(policy_version=iteration) for _ in range(3)], 120)


@flow(task_runner=ON_POOLS, persist_result=False)
def training():
    for number in range(3):
        call_iteration(iteration, iteration=number, attempt=1, outage_seconds=30.0)
    return FlowRunContext.get().flow_run.id


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of our own on a free loopback port; PostgreSQL refuses to run as root."""
    home = Path("/tmp") / f"callsheet-postgres-{os.getpid()}"  # the user postgres cannot enter pytest's folders
    home.mkdir(mode=0o700)
    if RUN_AS is not None:
        shutil.chown(home, RUN_AS)
    port = free_port(0)
    tools = INITDB.parent
    as_user = {"user": RUN_AS, "cwd": "/tmp", "env": {"PATH": os.environ["PATH"], "LANG": "C"}}
    subprocess.run(
        [tools / "initdb", "-D", home / "data", "-A", "trust", "-U", "prefect"],
        check=True,
        capture_output=True,
        **as_user,
    )
    server = subprocess.Popen(
        [tools / "postgres", "-D", home / "data", "-p", str(port), "-h", "127.0.0.1", "-k", home],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_user,
    )  # fmt: skip
    for _ in range(300):
        if (
            subprocess.run(
                [tools / "pg_isready", "-h", "127.0.0.1", "-p", str(port)], capture_output=True, check=False
            ).returncode
            == 0
        ):
            break
        time.sleep(0.2)
    yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    server.terminate()
    server.wait(30)
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def server(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `prefect server` as a user would run it on PostgreSQL."""
    port = free_port(0)
    env = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("server")),
        "PREFECT_API_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
    }
    command = [sys.executable, "-m", "prefect", "server", "start"]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
    )
    url = f"http://127.0.0.1:{port}/api"
    deadline = time.monotonic() + 300
    while is_healthy(url) is not None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.3)
    yield url
    process.terminate()
    process.wait(60)


def test_every_row_is_recorded_in_postgres(server: str, ray_session: None):
    with prefect_api(PrefectConfig(api_url=server)) as url:
        assert url == server
        with start_hosts(run_id="postgres-test", role_pools={"rollout": "main"}, steps=[rollout]):
            training()
        with get_client(sync_client=True) as client:
            for _ in range(300):
                names = [row.name for row in client.read_task_runs() if row.state_name == "Completed"]
                if len(names) == 9 + 3:
                    break
                time.sleep(0.2)
            assert sorted(name for name in names if name.startswith("rollout")) == [
                f"rollout/main/v{number}" for number in (0, 0, 0, 1, 1, 1, 2, 2, 2)
            ]
