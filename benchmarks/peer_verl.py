"""verl's side of the comparison; runs in an environment of its own and imports nothing of ours.

    .venv-peers/verl/bin/python -m benchmarks.peer_verl [--calls 200]

Prints one line of JSON: medians of an empty call to two workers, of bare Ray doing the same, and of 256 MiB (four int64
columns of 4,096 x 2,048) to two workers with a float32 column back, all in this run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from verl import DataProto  # pyright: ignore[reportMissingImports]
from verl.single_controller.base.decorator import Dispatch, register  # pyright: ignore[reportMissingImports]
from verl.single_controller.base.worker import Worker  # pyright: ignore[reportMissingImports]
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # pyright: ignore[reportMissingImports]

ROWS, LENGTH, WORKERS = 4096, 2048, 2
COLUMNS = ("input_ids", "attention_mask", "positions", "response_mask")


@ray.remote(num_cpus=0.1)
class BareWorker:
    """Ray without a wrapper."""

    def f(self) -> None:
        return None


@ray.remote(num_cpus=0.1)
class PeerWorker(Worker):
    """A worker as verl's users write it."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Empty."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data: DataProto) -> DataProto:
        """A float32 column of the rows, as a critic answers."""
        return DataProto.from_dict(tensors={"values": torch.ones(data.batch["input_ids"].shape)})


def median_seconds(call: Callable[[], Any], count: int, warm_up: int) -> float:
    """Median of `count` calls after `warm_up` others."""
    seconds = []
    for number in range(count + warm_up):
        began = time.perf_counter()
        call()
        if number >= warm_up:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=3 * 2**30)
    pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
    group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(cls=PeerWorker), device_name="cpu")
    empty = median_seconds(group.nothing, options.calls, 20)
    bare = [BareWorker.remote() for _ in range(WORKERS)]
    bare_seconds = median_seconds(lambda: ray.get([worker.f.remote() for worker in bare]), options.calls, 20)
    data = DataProto.from_dict(tensors={name: torch.ones(ROWS, LENGTH, dtype=torch.int64) for name in COLUMNS})
    batch = median_seconds(lambda: group.values(data), max(6, options.calls // 10), 2)
    print(json.dumps({"empty_seconds": empty, "bare_seconds": bare_seconds, "batch_seconds": batch}), flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
