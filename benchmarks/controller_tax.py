"""What an iteration costs beside its work: nine steps in five stages and their subflow, workers that do nothing.

    python -m benchmarks.controller_tax [--json] [--iterations 500]

Runs on the embedded default: a local Ray, worker groups in three pools, a Prefect server on SQLite.
"""

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.environment import apply_defaults

apply_defaults()

import ray  # noqa: E402 - Prefect and Ray read the environment when they are imported
from prefect import flow  # noqa: E402
from prefect.context import FlowRunContext  # noqa: E402

from benchmarks.figure import Figure, report  # noqa: E402
from benchmarks.noop_steps import ROLE_POOLS, STEPS, rollout, run_dag  # noqa: E402
from benchmarks.noop_workers import NoopWorker  # noqa: E402
from configs.pools import PoolConfig  # noqa: E402
from configs.training import PrefectConfig  # noqa: E402
from resources.cluster import Cluster  # noqa: E402
from resources.worker_group import start_group  # noqa: E402
from resources.worker_spec import WorkerSpec  # noqa: E402
from tasks.api import prefect_api, quick_retries  # noqa: E402
from tasks.collect import payload_bytes, spans_of  # noqa: E402
from tasks.hosts import start_hosts  # noqa: E402
from tasks.retention import Retention  # noqa: E402
from tasks.runner import ON_POOLS  # noqa: E402
from tasks.subflow import call_iteration, iteration_run_name  # noqa: E402
from tasks.ui_writer import UiWriter  # noqa: E402

MAX_SECONDS = 0.30
MAX_BYTES = 64 * 1024
WARM_UP = 10
WINDOW = 50
MAX_GROWTH = 1.25
"""Median of the last iterations over that of the first ones; the noise of a shared machine is about a tenth."""
KEEP = 200


@dataclass(kw_only=True)
class Measured:
    """One run."""

    seconds: list[float]
    bytes: list[int]
    rows: int
    database_bytes: int
    pruned: int


@flow(name="iteration", flow_run_name=iteration_run_name, task_runner=ON_POOLS, persist_result=False)
def one_iteration(iteration: int, attempt: int) -> tuple[int, Any]:
    """The DAG of PPO."""
    del attempt  # it is in the run's name
    steps = run_dag(rollout, iteration, 60.0)
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return payload_bytes(spans_of(steps, iteration)), context.flow_run.id


@flow(name="controller-tax", task_runner=ON_POOLS, persist_result=False)
def many_iterations(count: int) -> tuple[list[float], list[int], int]:
    """`count` iterations, asked again and pruned as a run's are."""
    seconds, sizes = [], []
    with quick_retries(), UiWriter() as writer:
        retention = Retention(writer, KEEP)
        for number in range(count):
            begun = time.monotonic()
            size, run_id = call_iteration(one_iteration, iteration=number, attempt=1, outage_seconds=30.0)
            seconds.append(time.monotonic() - begun)
            sizes.append(size)
            retention.ended(run_id)
    return seconds, sizes, retention.num_pruned


def measure(iterations: int, home: Path) -> Measured:
    """Run it on a fresh database in `home`."""
    pools = sorted(set(ROLE_POOLS.values()))
    with (
        Cluster("controller-tax", address="local", run_dir=home / "run", num_cpus=4) as cluster,
        prefect_api(PrefectConfig(home=str(home / "prefect"))),
    ):
        here = ray.get_runtime_context().get_node_id()
        cluster.reserve({name: PoolConfig(nodes=(1,)) for name in pools}, pins={name: [here] for name in pools})
        groups = {
            role: start_group(
                cluster,
                cluster.pools[pool],
                WorkerSpec(role=role, worker=NoopWorker, cpus=0.1, fraction=0.25, rendezvous=False),
            )
            for role, pool in ROLE_POOLS.items()
        }
        with start_hosts(run_id="controller-tax", role_pools=ROLE_POOLS, steps=STEPS) as hosts:
            hosts.attach(groups)
            seconds, sizes, pruned = many_iterations(iterations)
    database = home / "prefect" / "prefect.db"
    with sqlite3.connect(database) as connection:
        query = "select count(*) from task_run where state_name = 'Completed' and task_key not like 'one_iteration%'"
        (rows,) = connection.execute(query).fetchone()
    return Measured(seconds=seconds, bytes=sizes, rows=rows, database_bytes=database.stat().st_size, pruned=pruned)


def figures_of(measured: Measured) -> list[Figure]:
    """The figures against their targets."""
    steady = sorted(measured.seconds[WARM_UP:])
    first = statistics.median(measured.seconds[WARM_UP : WARM_UP + WINDOW])
    last = statistics.median(measured.seconds[-WINDOW:])
    recorded = measured.rows + len(STEPS) * measured.pruned
    spread = f"p5 {steady[len(steady) // 20]:.3f} s, p95 {steady[-1 - len(steady) // 20]:.3f} s"
    median = statistics.median(steady)
    return [
        Figure(name="controller_tax/iteration_seconds", value=median, unit="s", target=MAX_SECONDS, note=spread),
        Figure(
            name="controller_tax/growth",
            value=last / first,
            unit="ratio",
            target=MAX_GROWTH,
            note=f"{len(measured.seconds)} iterations, {first:.3f} s to {last:.3f} s",
        ),
        Figure(name="controller_tax/payload_bytes", value=max(measured.bytes), unit="B", target=MAX_BYTES),
        Figure(
            name="controller_tax/rows_recorded",
            value=recorded / (len(STEPS) * len(measured.seconds)),
            unit="ratio",
            target=1.0,
            better="higher",
            note=f"database {measured.database_bytes / 2**20:.1f} MiB",
        ),
    ]


def main() -> int:
    """Exit code 0 when every figure meets its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        measured = measure(options.iterations, Path(home))
    return report(figures_of(measured), options.json)


if __name__ == "__main__":
    sys.exit(main())
