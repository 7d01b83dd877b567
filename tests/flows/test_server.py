"""The Prefect server of a run: started, shared, restarted, gone; reached or refused; waited for; cancelled."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.flow_engine import run_flow_sync
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Scheduled

from configs.training import PrefectConfig
from resources.prefect_server import PrefectServer, PrefectServerError, free_port
from resources.prefect_supervisor import home_served_at, is_healthy, process_lives, read_record
from tasks.api import (
    ApiUnreachableError,
    CancelWatch,
    RunCancelledError,
    check_from_nodes,
    confirm_cancelled,
    prefect_api,
    ui_url,
    wait_for_api,
)
from tasks.subflow import call_iteration, iteration_run_name

ROOT = Path(__file__).resolve().parents[2]
USER = """
import sys, time
from resources.prefect_server import PrefectServer
with PrefectServer(sys.argv[1], flush_seconds=1) as server:
    print(server.api_url, server.joined, flush=True)
    time.sleep(600)
"""


def another_user(home: Path) -> tuple[subprocess.Popen, str, bool]:
    """A second run in a process of its own; returns (process, API URL, whether it joined)."""
    process = subprocess.Popen([sys.executable, "-c", USER, str(home)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url, joined = process.stdout.readline().split()
    return process, url, joined == "True"


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def gone(url: str, home: Path, seconds: float = 30.0) -> bool:
    """Whether the server stops answering (another's may answer there later) and its supervisor leaves."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if read_record(home) is None and home_served_at(url) != home:
            return True
        time.sleep(0.1)
    return False


def server_pid(home: Path) -> int:
    """The server's own process: the supervisor's child."""
    supervisor = read_record(home).supervisor_pid
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: migrations take seconds."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def api(home: Path):
    with prefect_api(PrefectConfig(home=str(home))) as url:
        yield url


@flow(flow_run_name=iteration_run_name, persist_result=False)
def iteration(iteration: int, attempt: int, ran: list | None = None) -> int:
    BODIES.append(iteration)
    if iteration == FAIL_AT[0]:
        FAIL_AT[0] = -1
        raise ValueError("the reward of iteration 3 failed")
    return 10 * iteration


BODIES: list[int] = []
FAIL_AT = [-1]


@pytest.mark.slow
def test_a_second_run_joins_and_the_last_one_to_leave_ends_the_server(home: Path):
    with PrefectServer(home, flush_seconds=1) as mine:
        assert not mine.joined
        process, url, joined = another_user(home)
        assert (url, joined) == (mine.api_url, True)
        assert mine.ui_url == ui_url(mine.api_url)
    assert is_healthy(url) is None
    end(process)
    assert gone(url, home)
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("select count(*) from flow_run").fetchone() == (0,)


@pytest.mark.slow
def test_a_killed_run_leaves_no_server(home: Path):
    process, url, joined = another_user(home)
    assert not joined
    supervisor = read_record(home).supervisor_pid
    end(process)
    assert gone(url, home)
    for _ in range(100):
        if not process_lives(supervisor):
            break
        time.sleep(0.1)
    assert not process_lives(supervisor)


@pytest.mark.slow
def test_a_busy_port_is_avoided_or_named(home: Path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert free_port(port) != port
        with pytest.raises(
            PrefectServerError, match=f"port {port} is busy on 127.0.0.1; free it, or leave the port out"
        ):
            PrefectServer(home, port=port).start()
    assert read_record(home) is None


@pytest.mark.slow
def test_another_databases_server_on_the_port_is_not_taken_for_ours(home: Path, tmp_path: Path):
    """Two runs of two users may choose one port at the same moment; the loser must not use the winner's database."""
    with PrefectServer(home, flush_seconds=1) as other:
        assert home_served_at(other.api_url) == home
        stale = {"port": other.record.port, "supervisor_pid": os.getpid()}
        (tmp_path / "server.json").write_text(json.dumps(stale))
        with PrefectServer(tmp_path, flush_seconds=1) as mine:
            assert mine.record.port != other.record.port
            assert home_served_at(mine.api_url) == tmp_path


@pytest.mark.slow
def test_two_servers_that_start_at_once_get_a_port_each(tmp_path: Path):
    servers = [PrefectServer(tmp_path / name, flush_seconds=1) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda server: server.start(), servers))
    try:
        assert [home_served_at(server.api_url) for server in servers] == [server.home for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.mark.slow
def test_a_server_that_is_killed_with_its_supervisor_is_started_again_at_its_address(home: Path):
    with prefect_api(PrefectConfig(home=str(home))) as url:
        supervisor = read_record(home).supervisor_pid
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in (supervisor, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        for _ in range(600):
            if read_record(home).supervisor_pid != supervisor and home_served_at(url) == home:
                break
            time.sleep(0.1)
        assert home_served_at(url) == home
    assert gone(url, home)


def test_a_home_that_cannot_be_made_or_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrefectServerError, match=r"home .*file cannot be used: File exists: .*; choose another folder"):
        PrefectServer(tmp_path / "file").start()
    (tmp_path / "home" / "users.lock").mkdir(parents=True)
    with pytest.raises(PrefectServerError, match=r"home .*home cannot be used: Is a directory: .*users.lock; choose"):
        PrefectServer(tmp_path / "home").start()


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path):
    (tmp_path / "prefect.db").write_text(
        "this is no database, and it is long enough not to be taken for an empty one" * 20
    )
    with pytest.raises(PrefectServerError, match=r"(?s)ended while starting.*file is not a database"):
        PrefectServer(tmp_path).start()
    assert read_record(tmp_path) is None


def test_a_server_that_does_not_answer_is_named_within_seconds():
    url = f"http://127.0.0.1:{free_port(4999)}/api"
    began = time.monotonic()
    with (
        pytest.raises(
            ApiUnreachableError, match=f"no Prefect server answers at {url} .*, which prefect.api_url names;"
        ),
        prefect_api(PrefectConfig(api_url=url)),
    ):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_the_embedded_server_hands_out_no_tokens_so_its_clients_ask_for_none(api: str):
    assert httpx.get(f"{api}/csrf-token", params={"client": "test"}).status_code == 422
    assert not get_client(sync_client=True)._client.enable_csrf_support


@pytest.mark.slow
def test_the_environments_server_is_used_when_the_config_names_none(api: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", api)
    with prefect_api(PrefectConfig(home="/nonexistent")) as url:
        assert url == api


@pytest.mark.slow
def test_every_node_is_asked_and_one_that_cannot_reach_the_api_is_named(api: str, ray_session: None):
    assert len(check_from_nodes(api)) == 1
    wrong = f"http://127.0.0.1:{free_port(4998)}/api"
    with pytest.raises(
        ApiUnreachableError,
        match=r"not reached from every node \(node [0-9.]+: .*refused.*loopback address.*prefect.api_url",
    ):
        check_from_nodes(wrong)


@pytest.mark.slow
def test_a_retried_run_goes_on_where_it_failed_and_repeats_nothing(api: str):
    """What is finished is known by its number, never by its place among the calls."""
    done: list[int] = []

    @flow(persist_result=False)
    def training():
        while len(done) < 5:
            done.append(call_iteration(iteration, iteration=len(done) + 1, attempt=1, outage_seconds=30.0))
        return done

    BODIES.clear()
    FAIL_AT[0] = 3
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(training, state=Scheduled())
        with pytest.raises(ValueError, match="iteration 3 failed"):
            run_flow_sync(training, flow_run=run)
        client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"), force=True)
        assert run_flow_sync(training, flow_run=client.read_flow_run(run.id)) == [10, 20, 30, 40, 50]
    assert BODIES == [1, 2, 3, 3, 4, 5]


@pytest.mark.slow
def test_equal_arguments_run_again_in_one_flow(api: str):
    @flow(persist_result=False)
    def training():
        return [call_iteration(iteration, iteration=7, attempt=attempt, outage_seconds=30.0) for attempt in (1, 2)]

    BODIES.clear()
    assert training() == [70, 70]
    assert BODIES == [7, 7]


@pytest.mark.slow
def test_an_outage_is_waited_out_and_no_body_runs_twice(api: str, home: Path):
    """The server is killed before one iteration and in the body of the next; its supervisor starts it again."""

    @flow(flow_run_name=iteration_run_name, persist_result=False)
    def killing(iteration: int, attempt: int) -> int:
        BODIES.append(iteration)
        if iteration == 2:
            os.kill(server_pid(home), signal.SIGKILL)
        return iteration

    @flow(persist_result=False)
    def training():
        first = call_iteration(killing, iteration=0, attempt=1, outage_seconds=120.0)
        os.kill(server_pid(home), signal.SIGKILL)
        rest = [call_iteration(killing, iteration=number, attempt=1, outage_seconds=120.0) for number in (1, 2, 3)]
        names.append(FlowRunContext.get().flow_run.id)
        return [first, *rest]

    names: list = []
    BODIES.clear()
    assert training() == [0, 1, 2, 3]
    assert BODIES == [0, 1, 2, 3]
    with sqlite3.connect(home / "prefect.db") as database:
        query = (
            "select name, state_name from flow_run where name like 'iteration-000_'"
            " and parent_task_run_id in (select id from task_run where flow_run_id = ?)"
        )
        states = dict(database.execute(query, (str(names[0]),)).fetchall())
    assert states == {f"iteration-000{number}": "Completed" for number in range(4)}


def test_an_outage_without_end_is_given_up_at_its_deadline():
    url = f"http://127.0.0.1:{free_port(4997)}/api"
    with pytest.raises(ApiUnreachableError, match=rf"{url} has not answered for 0.5 s .*the run can be resumed"):
        wait_for_api(0.5, url)


@pytest.mark.slow
def test_a_cancelled_run_is_noticed(api: str):
    @flow(persist_result=False, on_cancellation=[confirm_cancelled])
    def training():
        run_id = FlowRunContext.get().flow_run.id
        ids.append(run_id)
        with CancelWatch(run_id, every_seconds=0.1) as watch, get_client(sync_client=True) as client:
            watch.check()
            client.set_flow_run_state(run_id, Cancelling())
            for _ in range(100):
                watch.check()
                time.sleep(0.05)

    ids: list = []
    with pytest.raises(RunCancelledError, match="was cancelled"):
        training()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(ids[0]).state_name == "Cancelled"


@pytest.mark.slow
def test_another_server_on_the_port_does_not_cancel_a_run_that_it_does_not_know(tmp_path: Path):
    @flow(persist_result=False)
    def nothing() -> str:
        return str(FlowRunContext.get().flow_run.id)

    homes, port = [tmp_path / "ours", tmp_path / "another"], free_port(0)
    with contextlib.ExitStack() as stack:
        with PrefectServer(homes[0], port=port, flush_seconds=1) as ours:
            stack.enter_context(temporary_settings({PREFECT_API_URL: ours.api_url}))
            run_id = nothing()
            watch = stack.enter_context(CancelWatch(run_id, every_seconds=0.1))
            wait_until(lambda: watch._home == homes[0])
        with PrefectServer(homes[1], port=port, flush_seconds=1) as another:
            assert home_served_at(another.api_url) == homes[1]
            time.sleep(2.0)  # twenty looks
            assert not watch.is_cancelled
        with PrefectServer(homes[0], port=port, flush_seconds=1), get_client(sync_client=True) as client:
            client.delete_flow_run(run_id)
            wait_until(lambda: watch.is_cancelled)


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Fails when it does not hold in time."""
    end_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_at
        time.sleep(0.05)


@pytest.mark.slow
def test_a_task_that_fails_leaves_its_reason_in_the_flow_run(api: str, home: Path):
    @task
    def grade() -> int:
        raise ZeroDivisionError("the grader divided by zero")

    @flow(name="named-failure", persist_result=False)
    def training():
        grade()

    with pytest.raises(ZeroDivisionError):
        training()
    with sqlite3.connect(home / "prefect.db") as database:
        query = (
            "select state.message from flow_run join flow_run_state state on state.id = flow_run.state_id"
            " join flow on flow.id = flow_run.flow_id where flow.name = 'named-failure'"
        )
        assert "the grader divided by zero" in database.execute(query).fetchone()[0]


def test_a_record_of_garbage_is_no_server(tmp_path: Path):
    (tmp_path / "server.json").write_text("{")
    assert read_record(tmp_path) is None
    (tmp_path / "server.json").write_text(json.dumps({"port": 1}))
    assert read_record(tmp_path) is None
