"""What a worker-group call costs: an empty call beside bare Ray, a batch of 256 MiB there and a column back, a start.

    python -m benchmarks.dispatch [--json] [--sizes 2 8 32 64] [--calls 200] [--skip-start] [--skip-data]

Ours and bare Ray take turns within one run; figures are medians, the spread is that between the quartiles.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

import ray  # noqa: E402 - Ray reads the environment when it is imported

from benchmarks.dispatch_workers import ColumnWorker, EmptyWorker  # noqa: E402
from configs.pools import PoolConfig  # noqa: E402
from resources.cluster import Cluster  # noqa: E402
from resources.worker_group import WorkerGroup, WorkerSpec, start_group  # noqa: E402

MAX_RATIO = 1.25
HELD_SECONDS = 0.4
STORED_SECONDS = 0.08
START_SECONDS = 20.0
START_WORKERS = 32
ROWS, LENGTH = 4096, 2048
MAX_GROWTH_MIB = 32.0
"""Python's own growth between two measurements; the batch is 256 MiB."""


def figure(name: str, value: float, unit: str, target: float, note: str) -> Figure:
    """A figure for which lower is better."""
    return Figure(name=name, value=round(value, 4), unit=unit, target=target, note=note)


@ray.remote(num_cpus=0.1, runtime_env={"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0"}})
class BareWorker:
    """What a user of Ray alone would write."""

    def f(self) -> None:
        return None


def quartiles(seconds: Sequence[float]) -> str:
    """'0.91 (0.88-0.97) ms'."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f}) ms"


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def bare_workers(count: int) -> list[Any]:
    """Actors of Ray without a wrapper, up and running."""
    workers: list[Any] = [BareWorker.remote() for _ in range(count)]
    ray.get([worker.f.remote() for worker in workers])
    return workers


def empty_call(cluster: Cluster, size: int, calls: int) -> Figure:
    """The ratio of an empty call to bare Ray, in turns."""
    group = start_empty(cluster, size)
    bare = bare_workers(size)
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(calls + 20):
        pair = [timed(lambda: ray.get([worker.f.remote() for worker in bare])), timed(group.nothing)]
        if turn >= 20:
            theirs.append(pair[0])
            ours.append(pair[1])
    ratio = statistics.median(ours) / statistics.median(theirs)
    group.shutdown()
    for worker in bare:
        ray.kill(worker)
    note = f"ours {quartiles(ours)}, bare Ray {quartiles(theirs)}"
    return figure(f"empty call to {size} workers over bare Ray", ratio, "ratio", MAX_RATIO, note)


def start_empty(cluster: Cluster, size: int) -> WorkerGroup:
    """Workers that need no torch."""
    spec = WorkerSpec(
        role=f"empty-{size}", worker=EmptyWorker, rendezvous=False, cpus=0.1, threads=1, start_seconds=300
    )
    return start_group(cluster, cluster.pools["many"], spec, bundles=[0] * size)


def data_calls(cluster: Cluster, calls: int) -> list[Figure]:
    """A batch of four int64 columns to two workers, one float32 column back."""
    import torch
    from tensordict import TensorDict

    from resources.rows import Rows, ShardRef

    spec = WorkerSpec(role="columns", worker=ColumnWorker, rendezvous=False, threads=1)
    group = start_group(cluster, cluster.pools["pair"], spec)
    names = ("input_ids", "attention_mask", "positions", "response_mask")
    row_ids = torch.arange(ROWS)
    whole = TensorDict(
        {"row_ids": row_ids, **{name: torch.ones(ROWS, LENGTH, dtype=torch.int64) for name in names}}, batch_size=[ROWS]
    )
    held = [timed(lambda: group.values(whole)) for _ in range(calls)][2:]
    half = ROWS // 2
    shards = [ray.put(whole[:half]), ray.put(whole[half:])]
    stored = [timed(lambda: group.values_of_shard(shards)) for _ in range(calls + 2)][2:]
    before = peak_mib()
    columns = ("row_ids", *names)
    refs = [ShardRef(shard, tuple(range(i * half, (i + 1) * half)), columns) for i, shard in enumerate(shards)]
    rows = Rows(refs, range(ROWS))
    joined = [timed(lambda: group.stored_values(rows)) for _ in range(calls)][2:]
    growth = peak_mib() - before
    group.shutdown()
    mib = f"{4 * ROWS * LENGTH * 8 / 2**20:.0f} MiB"
    return [
        data_figure(f"{mib} from the driver to 2 workers, a float32 column back", held, HELD_SECONDS),
        data_figure(f"{mib} in the store to 2 workers, a float32 column stays there", stored, STORED_SECONDS),
        data_figure(f"{mib} in the store, joined and selected by row id", joined, HELD_SECONDS),
        figure("growth of the driver's peak memory with the batch in the store", growth, "MiB", MAX_GROWTH_MIB, ""),
    ]


def data_figure(name: str, seconds: Sequence[float], target: float) -> Figure:
    """A median of seconds."""
    return figure(name, statistics.median(seconds), "s", target, quartiles(seconds))


def peak_mib() -> float:
    """This process's peak resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start_figures(cluster: Cluster) -> list[Figure]:
    """The start of many CPU workers, beside the same number of bare Ray actors."""
    began = time.perf_counter()
    group = start_empty(cluster, START_WORKERS)
    seconds = time.perf_counter() - began
    assert group.has_torch() == [False] * START_WORKERS
    skew = group.start_skew_seconds
    group.shutdown()
    began = time.perf_counter()
    bare = bare_workers(START_WORKERS)
    theirs = time.perf_counter() - began
    for worker in bare:
        ray.kill(worker)
    note = f"bare Ray {theirs:.1f} s, start skew {skew:.2f} s, no torch"
    return [figure(f"start of {START_WORKERS} CPU workers", seconds, "s", START_SECONDS, note)]


def measure(sizes: Sequence[int], calls: int, with_start: bool, with_data: bool) -> list[Figure]:
    """All figures, or those of empty calls alone."""
    with Cluster("benchmark-dispatch", address="local", num_cpus=24, object_store_bytes=3 * 2**30) as cluster:
        cluster.reserve({"many": PoolConfig(bundles=1, cpus_per_bundle=10), "pair": PoolConfig(nodes=(2,))})
        figures = data_calls(cluster, max(6, calls // 10)) if with_data else []
        figures += start_figures(cluster) if with_start else []
        return figures + [empty_call(cluster, size, calls) for size in sizes]


def main() -> int:
    """Print a table, or a line of JSON per figure; 0 when every target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--skip-start", action="store_true")
    parser.add_argument("--skip-data", action="store_true")
    options = parser.parse_args()
    figures = measure(options.sizes, options.calls, not options.skip_start, not options.skip_data)
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
