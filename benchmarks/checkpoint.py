"""What saving costs, and how long a run takes to go on after a rollout worker died.

    python -m benchmarks.checkpoint [--json] [--small] [--only saves|recovery]

Saving is measured on 135M parameters with both moments (1.6 GB), in alternating rounds against writing and syncing as
many bytes. What an asynchronous save holds the step up is all that the controller waits for: the copy in memory and the
call that begins to write it, though a run takes the copy after every iteration whether it saves or not. The recovery is
one run. `--small` takes 5M parameters and skips the recovery.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults
from configs.model import ModelConfig, ModelShape
from configs.training import TrainedRoleConfig
from resources.ray_state import set_up_local_ray
from resources.snapshot_writer import SnapshotWriters
from resources.workers.actor import ActorWorker

MAX_SYNC = 1.3
MAX_ASYNC = 0.1
MAX_RECOVERY_SECONDS = 30.0
ROUNDS = 5
LARGE = ModelShape(
    num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, vocab_size=49152,
    max_positions=128,
)  # fmt: skip
SMALL = ModelShape(
    num_layers=4, hidden_size=256, intermediate_size=1024, num_heads=4, vocab_size=2048, max_positions=128
)


class Holder:
    """The actor in a process of its own."""

    def __init__(self, shape: ModelShape) -> None:
        self._worker = ActorWorker(ModelConfig(build="tiny", shape=shape), TrainedRoleConfig(), 0)
        self._worker.answers_are_copied = True  # as a worker's process says

    def num_bytes(self) -> int:
        """Of everything a checkpoint holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._worker.state()["tensors"].values())

    def save(self, folder: str) -> float:
        """A save that blocks: seconds."""
        return _seconds(lambda: self._worker.save_checkpoint(folder))

    def write_bytes(self, folder: str, count: int) -> float:
        """Writing and syncing as many bytes, in pieces of 16 MiB: seconds."""
        block = os.urandom(16 * 2**20)

        def write() -> None:
            with (Path(folder) / "bytes").open("wb", buffering=0) as file:
                left = count
                while left > 0:
                    left -= file.write(block[: min(left, len(block))])
                os.fsync(file.fileno())

        return _seconds(write)

    def snapshot(self) -> Any:
        """The copy that every iteration leaves in the object store."""
        return self._worker.snapshot()[1]


def _seconds(action: Callable[[], Any]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def measure_saves(shape: ModelShape, folder: Path) -> list[Figure]:
    """Synchronous against raw bytes, and how long an asynchronous save holds its role up."""
    make: Any = ray.remote(num_cpus=1)(Holder)
    holder = make.remote(shape)
    size: int = ray.get(holder.num_bytes.remote())
    writers = SnapshotWriters("benchmark", {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"})
    node = ray.get_runtime_context().get_node_id()
    ratios, syncs, copies, calls = [], [], [], []
    for number in range(ROUNDS):
        place = folder / str(number)
        place.mkdir()
        sync: float = ray.get(holder.save.remote(str(place / "sync")))
        raw: float = ray.get(holder.write_bytes.remote(str(place), size))
        begun = time.monotonic()
        kept = holder.snapshot.remote()
        ray.wait([kept], fetch_local=False)
        copies.append(time.monotonic() - begun)
        begun = time.monotonic()
        written = writers.write(node, str(place / "async"), 0, kept)
        calls.append(time.monotonic() - begun)
        ray.get(written)
        ratios.append(sync / raw)
        syncs.append(sync)
        del kept
        shutil.rmtree(place)
    writers.stop()
    ray.kill(holder)
    sync, ratio = statistics.median(syncs), statistics.median(ratios)
    return [
        _figure("checkpoint_bytes", size / 1e9, "GB"),
        _figure("checkpoint_sync_seconds", sync, "s"),
        _figure("checkpoint_sync_over_bytes", ratio, "of writing the bytes", MAX_SYNC),
        *asynchronous_figures(sync, copies, calls),
    ]


def asynchronous_figures(sync: float, copies: Sequence[float], calls: Sequence[float]) -> list[Figure]:
    """What an asynchronous save holds the step up over a synchronous one of `sync` seconds; its two parts by rounds."""
    name, unit = "checkpoint_async_blocks", "of the synchronous save"
    whole = statistics.median(copy + call for copy, call in zip(copies, calls, strict=True))
    return [
        _figure(name, whole / sync, unit, MAX_ASYNC),
        _figure(f"{name}, the copy in memory", statistics.median(copies) / sync, unit),
        _figure(f"{name}, the call to the writer", statistics.median(calls) / sync, unit),
    ]


def measure_recovery(folder: Path) -> Figure:
    """From the kill of a rollout worker to the next committed iteration, with the tiny model."""
    from flows.ppo import ppo
    from tasks.api import prefect_api
    from tests.chaos.faults import Fault, Injector
    from tests.chaos.runs import commit_times, tiny_config

    config = tiny_config(folder, "recovery", "split", iterations=4, prefect={"home": str(folder / "prefect")})
    fault = Fault(iteration=2, target="rollout", step="rollout", number=signal.SIGKILL)
    ends: dict[int, float] = {}
    with prefect_api(config.prefect), commit_times(ends), Injector(faults=[fault]) as injector:
        ppo(config)
    return _figure("rollout_worker_back_after", ends[2] - injector.made[0].at, "s", MAX_RECOVERY_SECONDS)


def _figure(name: str, value: float, unit: str, target: float | None = None) -> Figure:
    return Figure(name=name, value=round(value, 4), unit=unit, target=target)


def main() -> int:
    """Run and print; 0 when every target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=("saves", "recovery"))
    given = parser.parse_args()
    apply_defaults()
    set_up_local_ray()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures: list[Figure] = []
        if given.only != "recovery":
            store = 400_000_000 if given.small else 5_000_000_000
            ray.init(
                address="local", num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False
            )
            figures += measure_saves(SMALL if given.small else LARGE, folder)
            ray.shutdown()
        if given.only != "saves" and not given.small:
            figures.append(measure_recovery(folder))
    return report(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
