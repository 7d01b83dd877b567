"""Worker groups on a real local Ray."""

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from configs.pools import PoolConfig
from resources.cluster import Cluster
from resources.failures import StaleGroup, WorkerFailed
from resources.ranks import DEVICE_ENV, Mesh, device_index
from resources.worker_group import WorkerGroup, WorkerSpec, start_group, start_groups
from tests.resources.sample_workers import AsyncMemoryWorker, AsyncWorker, EchoWorker, MemoryWorker, NoTorchWorker


def echo(**more: Any) -> WorkerSpec:
    return WorkerSpec(**{"role": "echo", "worker": EchoWorker, "rendezvous": False, **more})


@pytest.fixture(scope="module")
def home(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One run for this module, with a pool of two bundles and one of four."""
    with Cluster("worker-group", run_dir=tmp_path_factory.mktemp("run")) as cluster:
        cluster.reserve({"two": PoolConfig(nodes=(2,)), "four": PoolConfig(bundles=4), "spare": PoolConfig(nodes=(2,))})
        yield cluster


@pytest.fixture(scope="module")
def group(home: Cluster) -> WorkerGroup:
    """Two echo workers."""
    return start_group(home, home.pools["two"], echo(kwargs={"offset": 100}, env={"MY_FLAG": "on"}, threads=3))


@pytest.fixture
def spare(home: Cluster) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts groups on the spare pool and ends them."""
    started: list[WorkerGroup] = []

    def start(**more: Any) -> WorkerGroup:
        started.append(start_group(home, home.pools["spare"], echo(role="spare", **more)))
        return started[-1]

    yield start
    for group in started:
        group.shutdown()


def test_ranks_get_their_environment_before_the_constructor_and_no_torch(group: WorkerGroup) -> None:
    keys = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "OMP_NUM_THREADS",
        "MY_FLAG",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS",
        "WG_PREFIX",
        "MALLOC_MMAP_MAX_",
    ]
    answers = group.environment(keys)
    assert [[answer[key] for key in keys] for answer in answers] == [
        ["0", "2", "0", "3", "on", "1", "echo", "0"],
        ["1", "2", "1", "3", "on", "1", "echo", "0"],
    ]
    assert [fact["rank"] for fact in group.facts()] == [0, 1]
    assert [fact["torch"] for fact in group.facts()] == [False, False]


def test_ranks_that_reserve_no_accelerator_see_none_on_a_node_that_has_some(group: WorkerGroup) -> None:
    for answer in group.environment(list(DEVICE_ENV)):
        assert answer == dict.fromkeys(DEVICE_ENV, "")
        assert device_index(answer["CUDA_VISIBLE_DEVICES"], 1) is None


def test_a_call_without_arguments_keeps_its_place_among_calls_with_some(group: WorkerGroup) -> None:
    group.add_state(-group.add_state(0)[0])
    pending = [group.submit(*call) for call in (("add_state", 2), ("state_now",), ("add_state", 3), ("state_now",))]
    assert [call.result() for call in pending] == [[2, 2], [2, 2], [5, 5], [5, 5]]
    group.add_state(-5)


def test_split_rows_come_back_joined_in_order(group: WorkerGroup) -> None:
    assert group.shift([1, 2, 3, 4, 5], by=1) == [102, 103, 104, 105, 106]
    assert group.call("shift", xs=[9]) == [109]


def test_per_rank_rank_zero_custom_and_metrics_dispatch(group: WorkerGroup) -> None:
    assert group.own(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.who() == 0
    assert group.times_rank(7) == 7
    assert group.measure() == {"loss": 2.0, "rate": 0.5, "time/step": 1.0, "low": 0.0}


def test_only_collecting_ranks_answer_on_a_mesh(home: Cluster) -> None:
    mesh = start_group(home, home.pools["four"], echo(role="mesh", mesh=Mesh(tp=2)))
    assert mesh.on_mesh([10, 11, 12]) == [(0, 10), (0, 11), (2, 12)]
    mesh.shutdown()


def test_bulk_data_stays_in_the_store_and_the_caller_gets_status_and_reference(group: WorkerGroup) -> None:
    answers = group.bulk(5)
    assert [status["rows"] for status, _ in answers] == [5, 5]
    assert [status["span"]["rank"] for status, _ in answers] == [0, 1]
    assert all(isinstance(reference, ray.ObjectRef) for _, reference in answers)
    assert [ray.get(reference).tolist() for _, reference in answers] == [[0] * 5, [1] * 5]


@pytest.mark.parametrize("worker", [MemoryWorker, AsyncMemoryWorker])
def test_a_snapshot_is_what_memory_held_before_the_calls_behind_it(
    spare: Callable[..., WorkerGroup], worker: type
) -> None:
    group = spare(worker=worker)
    calls = []
    for value in range(1, 6):
        calls.append(group.submit("snapshot"))
        if worker is AsyncMemoryWorker:  # keeps no order among calls under way; runs wait for a snapshot, too
            calls[-1].result()
        group.call("fill", float(value))
    kept = [float(ray.get(reference).max()) for call in calls for _, reference in call.result()]
    assert kept == [float(value) for value in range(5) for _ in range(2)]


def test_a_bulk_method_that_returns_no_pair_says_so(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match=r"echo\.not_a_pair is marked bulk and returned a int"):
        group.not_a_pair()


def test_an_array_argument_may_be_written_into_and_the_senders_stays(group: WorkerGroup) -> None:
    sent = [np.array([1.0, 3.0]), np.arange(50_000.0)]
    assert group.centre(sent) == [-1.0, -24_999.5]
    assert sent[0].tolist() == [1.0, 3.0]
    reference = ray.put(np.array([2.0, 4.0]))
    assert group.centre([reference, reference]) == [-1.0, -1.0]
    assert ray.get(reference).tolist() == [2.0, 4.0]
    assert group.is_view([reference, reference]) == [True, True]


def test_a_call_that_does_not_block_is_pending_and_has_spans(group: WorkerGroup) -> None:
    pending = group.slowly(0.2)
    assert not pending.is_done()
    assert pending.result() == [0, 1]
    assert pending.is_done()
    spans = pending.spans
    assert [span["rank"] for span in spans] == [0, 1]
    assert all(span["execute_seconds"] >= 0.2 and span["queue_seconds"] >= 0.0 for span in spans)


def test_async_methods_overlap(spare: Callable[..., WorkerGroup]) -> None:
    group = spare(worker=AsyncWorker)
    waiting = group.wait()
    assert group.plain() == [0, 1]
    group.let_go()
    assert waiting.result() == ["released", "released"]


def test_an_unknown_method_names_the_ones_there_are(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"role echo has no dispatched method 'shfit'; it has \['add_state'"):
        group.call("shfit", [1])
    with pytest.raises(AttributeError, match="shfit"):
        group.shfit([1])


def test_an_exception_names_role_rank_pool_and_method_and_leaves_the_group_usable(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed) as caught:
        group.fail(on=1)
    failure = caught.value.failure
    assert (failure.kind, failure.exception_type, failure.role, failure.pool) == (
        "exception",
        "ValueError",
        "echo",
        "two",
    )
    assert (failure.rank, failure.method, failure.pid) == (1, "fail", group.ranks[1]["pid"])
    assert str(caught.value).startswith("echo rank 1 of 2 failed in echo.fail: exception: ValueError: root cause")
    assert 'raise ValueError("root cause")' in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).failure == failure
    assert group.who() == 0


def test_an_exception_that_cannot_be_unpickled_is_still_readable(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match=r"TwoArgumentError: this and that"):
        group.fail_unpicklable()


def test_an_answer_that_cannot_be_pickled_is_an_error_that_names_the_rank(group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match=r"rank \d of 2 failed in echo\.answer_unpicklable: exception: .*generator"):
        group.answer_unpicklable()


def test_a_group_is_found_by_name_from_another_process_and_travels_by_handle(home: Cluster, group: WorkerGroup) -> None:
    @ray.remote(num_cpus=0)
    def by_name(run_id: str) -> list[int]:
        return WorkerGroup.attach(run_id, "echo").shift([1])

    @ray.remote(num_cpus=0)
    def by_handle(handle: WorkerGroup) -> tuple[list[int], str]:
        try:
            handle.restart()
        except ValueError as error:
            return handle.shift([2]), str(error)
        return [], ""

    assert ray.get(by_name.remote(home.run_id)) == [101]
    rows, refusal = ray.get(by_handle.remote(group))
    assert rows == [102]
    assert "the controller that started it does that" in refusal


def test_a_name_that_no_group_has_lists_those_there_are(home: Cluster, group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"run 'worker-group' has no worker group 'ecko'.*'echo'"):
        WorkerGroup.attach(home.run_id, "ecko")


def test_a_restart_gives_new_processes_and_refuses_calls_of_the_old_incarnation(
    home: Cluster, spare: Callable[..., WorkerGroup]
) -> None:
    group = spare()
    old = WorkerGroup.attach(home.run_id, "spare")
    before = [rank["pid"] for rank in group.ranks]
    assert group.add_state(5) == [5, 5]
    group.restart()
    assert group.incarnation == old.incarnation + 1
    assert group.add_state(1) == [1, 1]
    assert not set(before) & {rank["pid"] for rank in group.ranks}
    with pytest.raises(StaleGroup, match=f"incarnation {old.incarnation}"):
        old.facts()
    with pytest.raises(StaleGroup, match=f"incarnation {old.incarnation}"):
        old.add_state(1)
    assert WorkerGroup.attach(home.run_id, "spare").add_state(1) == [2, 2]


def test_a_constructor_that_raises_is_named_and_nothing_stays_claimed(
    home: Cluster, spare: Callable[..., WorkerGroup]
) -> None:
    with pytest.raises(
        WorkerFailed, match=r"spare rank 1 of 2 failed in spare\.__init__: exception: ValueError: root cause"
    ):
        spare(kwargs={"fail_on": 1})
    # The retry uses the same name and bundles, and is not told that they are taken.
    assert spare().who() == 0


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("nowhere.to.be:Found", r"'nowhere\.to\.be' does not import: ModuleNotFoundError: No module named 'nowhere'"),
        ("tests.resources.sample_workers:Missing", "has no class 'Missing'"),
        ("tests.resources.sample_workers", "write it as package.module:name"),
    ],
)
def test_a_worker_class_that_does_not_import_is_refused_before_any_process(
    spare: Callable[..., WorkerGroup], worker: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spare(worker=worker)


def test_a_reserved_environment_key_is_refused_before_any_process(spare: Callable[..., WorkerGroup]) -> None:
    with pytest.raises(ValueError, match=r"roles\.spare\.env sets MASTER_ADDR='x'"):
        spare(env={"MASTER_ADDR": "x"})


def test_a_mesh_that_does_not_divide_the_group_is_refused_before_any_process(spare: Callable[..., WorkerGroup]) -> None:
    with pytest.raises(ValueError, match="needs a multiple of 3 ranks and the group has 2"):
        spare(mesh=Mesh(tp=3))


def test_several_workers_of_a_role_may_share_a_bundle(home: Cluster, spare: Callable[..., WorkerGroup]) -> None:
    spec = echo(role="crowd", cpus=0.5, fraction=0.0)
    crowd = start_group(home, home.pools["spare"], spec, bundles=[0, 0, 1, 1])
    assert crowd.own([0, 1, 2, 3]) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    crowd.shutdown()


def test_two_groups_of_one_name_are_refused_and_the_first_stays(
    home: Cluster, spare: Callable[..., WorkerGroup]
) -> None:
    first = spare(cpus=0.5, fraction=0.5)
    with pytest.raises(ValueError, match="spare"):
        start_group(home, home.pools["four"], echo(role="spare"))
    assert first.who() == 0
    assert WorkerGroup.attach(home.run_id, "spare").who() == 0


def test_each_worker_writes_a_log_file_of_its_own(home: Cluster, group: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed):
        group.fail(on=0)
    assert "root cause" in (home.run_dir / "logs" / "echo-0.log").read_text()
    assert (home.run_dir / "logs" / "echo-1.log").is_file()


def test_shared_roles_are_processes_of_their_own_on_one_bundle(home: Cluster) -> None:
    specs = [echo(role="left"), echo(role="right")]
    groups = start_groups(home, home.pools["four"], specs, "shared")
    pids = [{fact["pid"] for fact in group.facts()} for group in groups.values()]
    assert len(pids[0] | pids[1]) == 8
    assert groups["left"].ranks[0]["node_id"] == groups["right"].ranks[0]["node_id"]
    for group in groups.values():
        group.shutdown()


def test_roles_that_are_split_cannot_be_cast_onto_one_pool(home: Cluster) -> None:
    with pytest.raises(ValueError, match=r"roles \['left', 'right'\] are split"):
        start_groups(home, home.pools["four"], [echo(role="left"), echo(role="right")], "split")


@pytest.mark.slow
def test_thirty_two_workers_start_without_torch(open_run: Callable[[], Cluster]) -> None:
    with open_run() as run:
        run.reserve({"many": PoolConfig(bundles=32, cpus_per_bundle=0.25)})
        began = time.monotonic()
        spec = WorkerSpec(role="many", worker=NoTorchWorker, rendezvous=False)
        group = start_group(run, run.pools["many"], spec)
        print(f"32 workers in {time.monotonic() - began:.1f} s, start skew {group.start_skew_seconds:.2f} s")
        assert group.has_torch() == [False] * 32


def test_the_log_folder_is_the_runs(home: Cluster) -> None:
    assert home.log_dir == Path(home.run_dir) / "logs"
