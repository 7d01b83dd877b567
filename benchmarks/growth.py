"""How the cost of an iteration grows, and whether memory does: plots into docs/growth/.

    python -m benchmarks.growth [--json] [--only work ranks iterations] [--iterations 2000] [--counts 2 8 64]
                                [--no-plots]

`work`: a real iteration (a tiny Llama sampled by vLLM, scored, trained, synced, all in one process) against prompts,
response length and group size, every response as long as the limit. `ranks`: the nine no-op steps of
`benchmarks.controller_tax` with 2 to 64 workers. `iterations`: thousands of them, each leaving a megabyte in the store,
with the time of each and the resident memory of driver, task hosts and Prefect server. What a run measures replaces
what `docs/growth/figures.json` has of the named part, and the plots are drawn from that file. Of `ranks` a run replaces
the counts that it was given and no others, so that figure is of one run and its plot may be of several.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.environment import apply_defaults

apply_defaults()

import psutil  # noqa: E402
import ray  # noqa: E402 - Ray reads the environment when it is imported
from prefect import flow  # noqa: E402

from benchmarks.charts import Series, line_chart  # noqa: E402
from benchmarks.figure import Figure, report  # noqa: E402
from benchmarks.growth_steps import GROWTH_STEPS, batch_id_of, one_iteration  # noqa: E402
from benchmarks.noop_steps import ROLE_POOLS  # noqa: E402
from benchmarks.noop_workers import StoringWorker  # noqa: E402
from configs.load import load_config  # noqa: E402
from configs.pools import PoolConfig  # noqa: E402
from configs.run import RunConfig  # noqa: E402
from configs.training import PrefectConfig  # noqa: E402
from resources.cluster import Cluster  # noqa: E402
from resources.worker_group import start_group  # noqa: E402
from resources.worker_spec import WorkerSpec  # noqa: E402
from tasks.api import prefect_api, quick_retries  # noqa: E402
from tasks.hosts import HostSet, start_hosts  # noqa: E402
from tasks.retention import Retention  # noqa: E402
from tasks.runner import ON_POOLS  # noqa: E402
from tasks.subflow import call_iteration  # noqa: E402
from tasks.ui_writer import UiWriter  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "docs/growth"
KEEP = 200
MAX_GROWTH_MIB = 64.0
"""Of a process between the first quarter and the end of the run."""
MAX_SLOWER = 1.25
"""Median of the last tenth of the iterations over that of the second tenth."""
BASE = {"prompts": 16, "length": 32, "group": 4}
WAYS = {"prompts": (8, 16, 32, 64, 128), "length": (8, 16, 32, 64, 128), "group": (2, 4, 8, 16, 32)}
REPEATS = 5
"""Of each size, after one that warms up."""
LONGEST = max(WAYS["length"])
Points = list[tuple[float, float]]


# Work -----------------------------------------------------------------------------------------------------------------


def work_config(prompts: int, length: int, group: int) -> RunConfig:
    """An iteration of this size."""
    return load_config(
        "quickstart-grpo",
        (
            "model.shape.max_positions=256",
            f"rollout.max_model_length={LONGEST + 16}",
            "rollout.kv_cache_bytes=256MiB",
            "algorithm.num_mini_batches=1",
            "algorithm.num_ppo_epochs=1",
            "actor.micro_batch_size=64",
            "validation.every=0",
            "validation.sources=[]",
            f"data.prompts_per_iteration={prompts}",
            f"rollout.max_response_length={length}",
            f"rollout.group_size={group}",
        ),
    )


def work(repeats: int = REPEATS) -> tuple[dict[str, Points], list[Figure]]:
    """Seconds of a real iteration against each size."""
    from tests.tasks.local_run import LocalRun, cast_here

    groups = cast_here(work_config(BASE["prompts"], LONGEST, max(WAYS["group"])))
    sampler = groups["rollout"].workers[0]
    sampler.eos_token_ids = set()  # so that every response is as long as the limit
    points: dict[str, Points] = {}
    for way, values in WAYS.items():
        points[way] = []
        for value in values:
            sizes = {**BASE, way: value}
            config = work_config(**sizes)
            sampler.rollout = config.rollout
            run = LocalRun(config, groups)
            run.sync()
            run.iterate()
            seconds = [_timed(run.iterate) for _ in range(repeats)]
            points[way].append((value, statistics.median(seconds)))
    groups["reward"].call("close")
    figures = []
    for way, found in points.items():
        (small, least), (large, most) = found[0], found[-1]
        note = ", ".join(f"{int(x)}: {y:.2f} s" for x, y in found)
        times = large / small
        name = f"iteration at {times:.0f}x the {way} / {times:.0f}x its cost"
        figures.append(Figure(name=name, value=most / least / times, unit="ratio", target=1.0, note=note))
    return points, figures


def _timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


# Controller -----------------------------------------------------------------------------------------------------------


@contextmanager
def stage(home: Path, workers: int) -> Iterator[HostSet]:
    """Pools, hosts and a server, with `workers` ranks shared by rollout and actor, and one of each other role."""
    pools = sorted(set(ROLE_POOLS.values()))
    with (
        Cluster("growth", address="local", run_dir=home / "run", num_cpus=24, object_store_bytes=2**28) as cluster,
        prefect_api(PrefectConfig(home=str(home / "prefect"))),
    ):
        cluster.reserve({name: PoolConfig(bundles=1, cpus_per_bundle=7) for name in pools})
        groups = {}
        for role, pool in ROLE_POOLS.items():
            size = max(1, workers // 2) if role in ("rollout", "actor") else 1
            spec = WorkerSpec(role=role, worker=StoringWorker, cpus=0.1, rendezvous=False, threads=1, start_seconds=300)
            groups[role] = start_group(cluster, cluster.pools[pool], spec, bundles=[0] * size)
        with start_hosts(run_id="growth", role_pools=ROLE_POOLS, steps=GROWTH_STEPS) as hosts:
            hosts.attach(groups)
            yield hosts


@flow(name="growth", task_runner=ON_POOLS, persist_result=False)
def many_iterations(count: int, hosts: HostSet, watch: Callable[[int], None]) -> list[float]:
    """Seconds of each iteration, the dropping of its batch included; `watch` is called between them."""
    seconds = []
    with quick_retries(), UiWriter() as writer:  # as every run has
        retention = Retention(writer, KEEP)
        for number in range(count):
            began = time.monotonic()
            run_id = call_iteration(one_iteration, iteration=number, attempt=1, outage_seconds=60.0)
            hosts.drop(batch_id_of(number))
            seconds.append(time.monotonic() - began)
            retention.ended(run_id)
            watch(number)
    return seconds


def ranks(counts: Sequence[int], iterations: int = 25) -> tuple[Points, list[Figure]]:
    """Seconds of a no-op iteration against the number of ranks."""
    points: Points = []
    for count in counts:
        with tempfile.TemporaryDirectory() as home, stage(Path(home), count) as hosts:
            seconds = many_iterations.with_options(validate_parameters=False)(iterations, hosts, lambda _: None)
        points.append((count, statistics.median(seconds[5:])))
    note = ", ".join(f"{int(x)}: {y:.3f} s" for x, y in points)
    name = f"no-op iteration, {counts[-1]} workers over {counts[0]}"
    return points, [Figure(name=name, value=points[-1][1] / points[0][1], unit="ratio", note=note)]


def iterations(count: int) -> tuple[dict[str, Any], list[Figure]]:
    """Seconds and memory over many no-op iterations."""
    every = max(1, count // 100)
    memory: dict[str, Points] = {"driver": [], "task hosts": [], "store": [], "Prefect server": []}
    with tempfile.TemporaryDirectory() as home, stage(Path(home), 2) as hosts:
        asked: list[Any] = [host.facts.remote() for host in hosts._hosts.values()]
        pids = [facts["pid"] for facts in ray.get(asked, timeout=30)]
        server = psutil.Process(json.loads((Path(home) / "prefect/server.json").read_text())["supervisor_pid"])

        def watch(number: int) -> None:
            if (number + 1) % every:
                return
            memory["driver"].append((number + 1, _mib(psutil.Process())))
            memory["task hosts"].append((number + 1, sum(_mib(psutil.Process(pid)) for pid in pids)))
            memory["store"].append((number + 1, _stored_mib()))
            children = server.children(recursive=True)
            memory["Prefect server"].append((number + 1, sum(_mib(child) for child in children)))

        seconds = many_iterations.with_options(validate_parameters=False)(count, hosts, watch)
    window = max(1, count // 10)
    slower = statistics.median(seconds[-window:]) / statistics.median(seconds[window : 2 * window])
    times = [(end, statistics.median(seconds[end - every : end])) for end in range(every, count + 1, every)]
    note = f"median {statistics.median(seconds):.3f} s"
    name = f"iteration {count} / iteration {2 * window}, no-op"
    figures = [Figure(name=name, value=slower, unit="ratio", target=MAX_SLOWER, note=note)]
    for name, points in memory.items():
        after = points[len(points) // 4 :]
        grown = after[-1][1] - after[0][1]
        note = f"{after[0][1]:.0f} MiB at {int(after[0][0])}, {after[-1][1]:.0f} MiB at {int(after[-1][0])}"
        what = f"growth of the {name} over {count} iterations"
        figures.append(Figure(name=what, value=grown, unit="MiB", target=MAX_GROWTH_MIB, note=note))
    return {"seconds": times, "memory": memory}, figures


def _mib(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


def _stored_mib() -> float:
    total, free = ray.cluster_resources(), ray.available_resources()
    return (total["object_store_memory"] - free.get("object_store_memory", 0.0)) / 2**20


# Output ---------------------------------------------------------------------------------------------------------------


def draw(part: str, found: Any, folder: Path) -> None:
    """The plots of one part, and its points beside those of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "figures.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if part == "ranks":  # counts of earlier runs stay, see the module
        found = sorted({**dict(kept.get("ranks", ())), **dict(found)}.items())
    charts: dict[str, str] = {}
    if part == "work":
        labels = {"prompts": "prompts", "length": "tokens of a response", "group": "responses a prompt"}
        for way, points in found.items():
            fixed = ", ".join(f"{value} {labels[name]}" for name, value in BASE.items() if name != way)
            charts[f"iteration-{way}"] = line_chart(f"Iteration; {fixed}", labels[way], "seconds",
                                                    [Series(name=way, points=points)])  # fmt: skip
    elif part == "ranks":
        charts["iteration-ranks"] = line_chart(
            "No-op iteration", "workers", "seconds", [Series(name="ranks", points=found)], logarithmic=True
        )
    else:
        seconds = [Series(name="seconds", points=found["seconds"])]
        charts["iteration-number"] = line_chart("No-op iteration", "iteration", "seconds", seconds, dots=False)
        held = [Series(name=name, points=points) for name, points in found["memory"].items()]
        charts["memory"] = line_chart("Resident memory", "iteration", "MiB", held, dots=False)
    for name, text in charts.items():
        (folder / f"{name}.svg").write_text(text)
    file.write_text(json.dumps({**kept, part: _rounded(found)}, indent=1) + "\n")


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return round(found, 4)


def main() -> int:
    """Run, draw, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=["work", "ranks", "iterations"], default=["work", "ranks"])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="workers, for ranks")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--no-plots", action="store_true", help="print the figures and write nothing")
    options = parser.parse_args()
    parts: dict[str, Callable[[], tuple[Any, list[Figure]]]] = {
        "work": work, "ranks": lambda: ranks(options.counts), "iterations": lambda: iterations(options.iterations)
    }  # fmt: skip
    figures: list[Figure] = []
    for part in options.only:
        found, measured = parts[part]()
        if not options.no_plots:
            draw(part, found, options.folder)
        figures += measured
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
