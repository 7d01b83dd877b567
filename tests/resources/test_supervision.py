"""What the user is told when a worker dies, stops, blocks or is merely busy."""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from configs.pools import PoolConfig
from resources.cluster import Cluster
from resources.failures import CallTimeout, Failure, WorkerFailed, choose_root, death_kind
from resources.process_facts import is_running
from resources.worker_group import WorkerGroup, WorkerSpec, start_group
from tests.resources.sample_workers import EchoWorker, SumWorker


@pytest.fixture(scope="module")
def home(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One run for this module."""
    with Cluster("supervision", run_dir=tmp_path_factory.mktemp("run")) as cluster:
        cluster.reserve({"main": PoolConfig(nodes=(2,))})
        yield cluster


@pytest.fixture
def start(home: Cluster) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts a group of two on the pool and ends it."""
    started: list[WorkerGroup] = []

    def begin(worker: type = EchoWorker, **more: Any) -> WorkerGroup:
        spec = WorkerSpec(**{"role": "echo", "worker": worker, "rendezvous": False, **more})
        started.append(start_group(home, home.pools["main"], spec))
        return started[-1]

    yield begin
    for group in started:
        group.shutdown()


def wait_until(is_true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


@pytest.mark.parametrize(
    ("how", "kind", "detail"),
    [
        ("exit", "exit code", "exit code 3"),
        ("SIGKILL", "signal", "SIGKILL"),
        ("SIGSEGV", "signal", "SIGSEGV"),
    ],
)
def test_a_death_names_the_rank_the_way_it_ended_and_its_last_words(
    start: Callable[..., WorkerGroup], how: str, kind: str, detail: str
) -> None:
    group = start()
    pids = [rank["pid"] for rank in group.ranks]
    with pytest.raises(WorkerFailed) as caught:
        group.end(on=1, how=how, timeout=40)
    failure = caught.value.failure
    assert (failure.rank, failure.kind, failure.pid) == (1, kind, pids[1])
    assert (failure.role, failure.pool, failure.node_ip) == ("echo", "main", group.ranks[1]["node"])
    assert failure.detail.startswith(detail)
    assert "last words" in failure.log_tail
    # The peer that slept on is ended too, and every later call tells the first failure again.
    assert wait_until(lambda: not is_running(pids[0]))
    with pytest.raises(WorkerFailed) as again:
        group.nothing()
    assert again.value.failure.rank == 1
    assert group.failure is not None


def test_a_death_between_calls_is_known_before_the_next_one(start: Callable[..., WorkerGroup]) -> None:
    group = start()
    os.kill(group.ranks[0]["pid"], signal.SIGKILL)
    assert wait_until(lambda: group.failure is not None)
    assert group.failure is not None
    assert (group.failure.rank, group.failure.kind) == (0, "signal")
    group.restart()
    assert group.add_state(1) == [1, 1]


def test_a_rank_that_raises_releases_a_peer_blocked_in_a_collective(start: Callable[..., WorkerGroup]) -> None:
    group = start(SumWorker, rendezvous=True)
    assert group.total() == [3, 3]
    pids = [rank["pid"] for rank in group.ranks]
    with pytest.raises(
        WorkerFailed, match=r"rank 1 of 2 failed in echo\.total_unless: exception: ValueError: root cause"
    ):
        group.total_unless(1, timeout=60)
    assert wait_until(lambda: not is_running(pids[0]))
    assert group.failure is not None
    assert group.failure.rank == 1


def test_a_missed_deadline_names_the_ranks_that_had_not_answered_and_what_they_did(
    start: Callable[..., WorkerGroup],
) -> None:
    group = start()
    with pytest.raises(CallTimeout) as caught:
        group.fail(on=5, others=60.0, timeout=1.5)
    failure = caught.value.failure
    assert failure.kind == "deadline"
    assert failure.detail == "2 of 2 ranks did not answer within 1.5 s"
    assert [text.split(" (")[0] for text in failure.pending] == ["rank 0", "rank 1"]
    assert isinstance(caught.value, TimeoutError)
    assert type(pickle.loads(pickle.dumps(caught.value))) is CallTimeout
    with pytest.raises(WorkerFailed):
        group.nothing()


@pytest.mark.slow
def test_a_stopped_process_is_found_and_a_busy_one_is_left_alone(start: Callable[..., WorkerGroup]) -> None:
    group = start()
    busy = group.submit("spin", 13.0, timeout=60)
    assert len(busy.result()) == 2
    assert group.failure is None
    os.kill(group.ranks[1]["pid"], signal.SIGSTOP)
    with pytest.raises(WorkerFailed) as caught:
        group.nothing(timeout=60)
    failure = caught.value.failure
    assert (failure.rank, failure.kind) == (1, "stopped")
    assert "no beat for" in failure.detail
    assert "no CPU time gained" in failure.detail


def test_an_attached_process_is_told_the_cause_by_the_controller(
    home: Cluster, start: Callable[..., WorkerGroup]
) -> None:
    @ray.remote(num_cpus=0)
    def call_from_elsewhere(run_id: str) -> Failure:
        group = WorkerGroup.attach(run_id, "echo")
        try:
            group.end(on=1, how="exit", timeout=40)
        except WorkerFailed as error:
            return error.failure
        raise AssertionError("the worker did not die")

    group = start()
    failure = ray.get(call_from_elsewhere.remote(home.run_id))
    assert (failure.rank, failure.detail) == (1, "exit code 3")
    assert "last words" in failure.log_tail
    assert wait_until(lambda: group.failure is not None)
    assert group.failure is not None
    assert group.failure.detail == "exit code 3"


def test_a_deadline_missed_elsewhere_is_the_failure_the_controller_keeps(
    home: Cluster, start: Callable[..., WorkerGroup]
) -> None:
    @ray.remote(num_cpus=0)
    def call_from_elsewhere(run_id: str) -> str:
        try:
            WorkerGroup.attach(run_id, "echo").fail(on=5, others=60.0, timeout=1.0)
        except CallTimeout as error:
            return error.failure.kind
        return "answered"

    group = start()
    assert ray.get(call_from_elsewhere.remote(home.run_id)) == "deadline"
    assert wait_until(lambda: group.failure is not None)
    assert group.failure is not None
    assert group.failure.kind == "deadline"


def failure(rank: int, kind: str, raised_at: float) -> Failure:
    return Failure(
        kind=kind, detail="", role="r", group="g", pool="p", rank=rank, world_size=3, node_ip="", node_id="", pid=1,
        incarnation=1, raised_at=raised_at,
    )  # fmt: skip


def test_a_death_is_the_cause_before_an_exception_that_was_seen_earlier() -> None:
    seen = [failure(0, "exception", 1.0), failure(2, "exception", 0.5), failure(1, "signal", 9.0)]
    assert choose_root(seen).rank == 1
    assert choose_root(seen[:2]).rank == 2


@pytest.mark.parametrize(
    ("text", "exit_code", "signal_name", "tail", "is_oom", "expected"),
    [
        ("The actor died because its node has died.", None, None, [], False, "node lost"),
        ("Task was killed due to the node running low on memory.", None, None, [], False, "out of memory"),
        ("connection error", None, None, [], True, "out of memory"),
        ("connection error", 7, None, [], False, "exit code"),
        ("connection error", 7, None, [], True, "exit code"),
        ("connection error", None, "SIGTERM", [], True, "signal"),
        ("connection error", None, None, ["Fatal Python error: Aborted"], True, "signal"),
        ("connection error", None, "SIGTERM", [], False, "signal"),
        ("connection error", None, None, ["Fatal Python error: Aborted"], False, "signal"),
    ],
)
def test_the_kind_of_a_death_follows_from_what_is_known(
    text: str, exit_code: int | None, signal_name: str | None, tail: list[str], is_oom: bool, expected: str
) -> None:
    assert death_kind(text, exit_code, signal_name, tail, is_oom)[0] == expected


def test_a_failure_survives_its_json() -> None:
    one = failure(1, "signal", 2.0).with_tail(["a", "b"])
    assert Failure.from_json(one.to_json()) == one
