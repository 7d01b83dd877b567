"""Entering and leaving a cluster: names, addresses, and what is left by every door."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from configs.pools import PoolConfig
from resources.cleanup import RUN_KEY, clean, doctor_facts, find_leftovers
from resources.cluster import Cluster, ClusterError, check_listening, given
from resources.process_facts import descendants, is_running, processes_with_environment, start_ticks
from resources.ray_state import named_actors
from resources.registry import list_cards
from resources.worker_group import WorkerSpec, start_group
from tests.interrupts import heed_interrupts
from tests.resources.sample_workers import EchoWorker

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0


@pytest.fixture(scope="module")
def address(local_ray: None) -> str:
    """Of the module's Ray, for drivers in other processes."""
    return ray.get_runtime_context().gcs_address


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., "Driver"]]:
    """Starts controllers in processes of their own and ends those that are left."""
    started: list[Driver] = []

    def start(run_id: str, address: str, how: str = "wait") -> Driver:
        started.append(Driver(run_id, address, tmp_path / run_id, how))
        return started[-1]

    yield start
    for driver in started:
        if driver.process.poll() is None:
            driver.process.kill()
        driver.process.communicate()


class Driver:
    """One controller process and the line it printed."""

    def __init__(self, run_id: str, address: str, run_dir: Path, how: str) -> None:
        self.run_id = run_id
        script = str(Path(__file__).with_name("sample_driver.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, run_id, address, str(run_dir), how],
            preexec_fn=heed_interrupts,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def facts(self) -> dict[str, Any]:
        """The next line of JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def leaves(self, facts: dict[str, Any], seconds: float = 30.0) -> list[str]:
        """What is still there after a while."""
        deadline = time.monotonic() + seconds
        left = self._left(facts)
        while left and time.monotonic() < deadline:
            time.sleep(0.2)
            left = self._left(facts)
        return left

    def _left(self, facts: dict[str, Any]) -> list[str]:
        left = [f"process {pid}" for pid in facts["pids"] if is_running(pid)]
        left += [f"process {pid} by its environment" for pid in processes_with_environment(RUN_KEY, self.run_id)]
        if ray.is_initialized():
            left += [f"actor {name}" for namespace, name in named_actors() if namespace == self.run_id]
            left += [
                group["name"]
                for group in placement_group_table().values()
                if group["state"] != "REMOVED" and group["name"].startswith(f"callsheet/{self.run_id}/")
            ]
        return left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("end", None, 0),
        ("exception", None, 1),
        ("wait", signal.SIGINT, None),
        ("wait", signal.SIGTERM, 128 + signal.SIGTERM),
        ("wait", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_controller_on_a_shared_cluster_leaves_nothing_by_any_door(
    address: str, drive: Callable[..., Driver], how: str, number: signal.Signals | None, code: int | None
) -> None:
    driver = drive(f"door-{how}-{number}", address, how)
    facts = driver.facts()
    if number is not None:
        driver.process.send_signal(number)
    driver.process.wait(timeout=60)
    assert code is None or driver.process.returncode == code
    assert driver.leaves(facts) == []
    if number != signal.SIGKILL:
        assert driver.run_id not in [run for run, _ in list_cards("run")]


@pytest.mark.slow
def test_a_killed_controller_takes_its_local_cluster_with_it(drive: Callable[..., Driver]) -> None:
    driver = drive("door-local", "local")
    facts = driver.facts()
    helpers = {pid: start_ticks(pid) for pid in descendants([driver.process.pid])}
    assert len(helpers) > 4
    time.sleep(2.5)  # The reaper looks once a second.
    driver.process.kill()
    driver.process.wait(timeout=60)
    assert driver.leaves(facts) == []
    assert wait_until(lambda: not [pid for pid, started in helpers.items() if start_ticks(pid) == started])


def wait_until(is_true: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_true()


@pytest.mark.slow
def test_two_runs_share_a_cluster_without_touching_each_other(address: str, drive: Callable[..., Driver]) -> None:
    drivers = [drive("twin-a", address, "calls"), drive("twin-bb", address, "calls")]
    firsts = [driver.facts() for driver in drivers]
    assert [facts["state"] for facts in firsts] == [[6, 6], [7, 7]]
    assert [driver.facts()["state"] for driver in drivers] == [[26, 26], [27, 27]]
    assert [driver.process.wait(timeout=60) for driver in drivers] == [0, 0]


def test_a_second_live_run_of_one_name_is_refused_and_the_first_goes_on(
    open_run: Callable[[], Cluster], tmp_path: Path
) -> None:
    with open_run() as first:
        with pytest.raises(
            ClusterError, match=rf"a run named '{first.run_id}' is on this cluster already \(pid {os.getpid()}"
        ):
            Cluster(first.run_id, run_dir=tmp_path).__enter__()
        first.reserve({"main": PoolConfig(bundles=1)})
        assert first.pools["main"].size == 1


@pytest.mark.slow
def test_the_name_of_a_killed_run_can_be_used_again_and_clean_finds_it(
    address: str, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = drive("phoenix", address)
    facts = driver.facts()
    driver.process.kill()
    driver.process.wait(timeout=60)
    assert driver.leaves(facts) == []
    deadline = time.monotonic() + 20
    while "phoenix" not in find_leftovers().runs and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "phoenix" in find_leftovers().runs
    with Cluster("phoenix", run_dir=tmp_path) as again:
        assert again.run_id == "phoenix"
    assert "phoenix" not in find_leftovers().runs
    clean()
    assert find_leftovers().is_empty


def test_clean_removes_a_detached_pool_and_its_workers(open_run: Callable[[], Cluster]) -> None:
    with open_run() as run:
        run.reserve({"kept": PoolConfig(bundles=1, lifetime="detached")})
        spec = WorkerSpec(role="echo", worker=EchoWorker, rendezvous=False)
        group = start_group(run, run.pools["kept"], spec)
        pid = group.ranks[0]["pid"]
    assert is_running(pid)
    assert [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"] == [
        f"callsheet/{run.run_id}/kept/0"
    ]
    assert clean(run.run_id).runs == [run.run_id]
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)
    assert [group for group in placement_group_table().values() if group["state"] != "REMOVED"] == []
    assert find_leftovers().is_empty


def test_an_address_nobody_listens_on_is_refused_within_seconds(free_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(ClusterError, match=rf"nobody listens at 127\.0\.0\.1:{free_port}"):
        check_listening(f"127.0.0.1:{free_port}")
    print(f"refused after {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("address", ["somewhere", "host:port", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match="write host:port"):
        check_listening(address)


def test_a_run_id_with_a_slash_is_refused() -> None:
    with pytest.raises(ClusterError, match="run id is 'a/b'"):
        Cluster("a/b")


def test_doctor_tells_versions_nodes_ports_and_shared_memory(open_run: Callable[[], Cluster]) -> None:
    with open_run():
        facts = doctor_facts()
    assert facts["versions"]["ray"] == ray.__version__
    assert facts["ray"]["connected"] is True
    assert facts["ray"]["token_auth"] is True
    assert facts["ray"]["nodes"][0]["total"]["CPU"] == 16.0
    assert facts["shared_memory"]["total_bytes"] > 0
    assert facts["listening_ports"] == sorted(facts["listening_ports"])


def test_doctor_passes_over_an_install_that_has_lost_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert [dist.name for dist in distributions(path=[str(tmp_path)])] == [None]
    assert doctor_facts()["versions"]["ray"] == ray.__version__


def test_a_local_cluster_is_given_a_size_of_zero_and_left_to_find_what_is_left_out() -> None:
    asked = {"num_cpus": 4, "num_gpus": 0, "resources": {}, "object_store_memory": None}
    assert given(asked) == {"num_cpus": 4, "num_gpus": 0}
    assert given({"num_gpus": None, "resources": {"NPU": 0.0}}) == {"resources": {"NPU": 0.0}}


def test_the_children_of_a_process_are_found_by_descent() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
    try:
        deadline = time.monotonic() + 10
        while len(descendants([child.pid])) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(descendants([child.pid])) == 1
        assert child.pid in descendants([os.getpid()])
    finally:
        for pid in descendants([child.pid]):
            os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()
