"""Rollout servers against one bare LLM.generate call on the same requests, and a weight update under load.

`python -m benchmarks.servers [--json] [--only tiny smollm2]`. The servers and the bare call use the same engine process
in turn, pairwise, so that both meet the same machine; the ratio is the median of the pairs. What the servers cost is a
matter of requests and tokens and not of the model, so there are two: one of two layers that samples 20,000 tokens a
second on a core, as no model of use does and where it shows most, and SmolLM2-135M (in bfloat16 where
the CPU has it).
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from benchmarks.arithmetic import FASTEST
from benchmarks.figure import Figure, report
from benchmarks.peers import smollm2_folder
from configs.data import DataConfig, SourceConfig
from configs.environment import apply_defaults
from configs.model import ModelConfig, ModelShape
from configs.pools import PoolConfig
from configs.rollout import RolloutConfig, ServersConfig
from resources.cluster import Cluster
from resources.engines.base import GenerationRequest, Sampling
from resources.frozen_heap import freeze_heap
from resources.replicas import GroupReplica
from resources.rollout_servers import RolloutServers
from resources.worker_group import WorkerGroup, WorkerSpec, start_group

TARGET_RATIO = 0.95
PAIRS = 5
UPDATE_AFTER_SECONDS = 0.3
SHAPE = ModelShape(num_layers=2, hidden_size=128, intermediate_size=512, num_heads=4, vocab_size=128, max_positions=128)
SAMPLING = Sampling()


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and what is asked of it."""

    model: ModelConfig
    requests: int
    slots: int
    """Fewer than requests, so that a pair lasts seconds and not its first and last call."""
    min_tokens: int
    max_tokens: int
    """Responses of many lengths, so that one ends in nearly every step, as they do in a rollout."""
    kv_cache_bytes: int


def loads() -> dict[str, Load]:
    """The two of them; the real model is fetched where it is asked for."""
    return {
        "tiny": Load(
            model=ModelConfig(build="tiny", shape=SHAPE),
            requests=512,
            slots=128,
            min_tokens=24,
            max_tokens=72,
            kv_cache_bytes=64 * 2**20,
        ),
        "smollm2": Load(
            model=ModelConfig(path=str(smollm2_folder()), dtype=FASTEST),
            requests=96,
            slots=32,
            min_tokens=8,
            max_tokens=40,
            kv_cache_bytes=512 * 2**20,
        ),
    }


def requests(load: Load, first: int) -> list[GenerationRequest]:
    """Prompts of 16 tokens that share nothing; responses of exactly `max_tokens`."""
    return [
        GenerationRequest(
            row_id=first + n,
            prompt_ids=tuple(4 + (7 * n + 13 * k + first) % 90 for k in range(16)),
            seed=first + n,
            max_tokens=load.min_tokens + 7 * n % (load.max_tokens - load.min_tokens + 1),
        )
        for n in range(load.requests)
    ]


def start_engine(cluster: Cluster, load: Load) -> WorkerGroup:
    """One vLLM engine in a worker process of its own."""
    data = DataConfig(sources=(SourceConfig(name="s", kind="sorting", size=600),), prompts_per_iteration=8)
    rollout = RolloutConfig(
        max_running_sequences=load.slots, max_model_length=128, kv_cache_bytes=load.kv_cache_bytes,
        servers=ServersConfig(enabled=True), enable_prefix_caching=False,
    )  # fmt: skip
    spec = WorkerSpec(
        role="rollout",
        worker="benchmarks.server_workers:ComparedWorker",
        args=(rollout, load.model, data, 0),
        kwargs={"threads": 1},
        threads=1,
        call_seconds=600.0,
    )
    return start_group(cluster, cluster.pools["engines"], spec)


def compare(group: WorkerGroup, servers: RolloutServers, load: Load) -> list[tuple[float, float]]:
    """Tokens a second of (servers, bare call), pair by pair, the order changing."""
    servers.generate(requests(load, 10**6), SAMPLING)  # warm, and the steps a call takes settle
    group.call("bare_generate", requests(load, 2 * 10**6), SAMPLING)
    pairs: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        asked = requests(load, 10_000 * pair)
        rates: dict[str, float] = {}
        for way in ("served", "bare") if pair % 2 else ("bare", "served"):
            if way == "bare":
                tokens, seconds = group.call("bare_generate", asked, SAMPLING)[0]
            else:
                started = time.monotonic()
                answers = servers.generate(asked, SAMPLING)
                tokens, seconds = sum(len(a.token_ids) for a in answers), time.monotonic() - started
            rates[way] = tokens / seconds
        pairs.append((rates["served"], rates["bare"]))
    return pairs


def update_under_load(group: WorkerGroup, servers: RolloutServers, load: Load) -> tuple[int, int, float]:
    """(requests lost or wrong, requests that span both versions, seconds without sampling) of an update on the way."""
    asked = requests(load, 5 * 10**6)
    futures = [servers.submit(request, SAMPLING) for request in asked]
    time.sleep(UPDATE_AFTER_SECONDS)
    began = time.monotonic()
    with servers.paused():
        group.call("new_version", 1)
    stopped = time.monotonic() - began
    answers = [future.result(timeout=300) for future in futures]
    bad = sum(
        len(a.token_ids) != r.max_tokens or len(a.versions) != r.max_tokens or list(a.versions) != sorted(a.versions)
        for r, a in zip(asked, answers, strict=True)
    )
    return bad, sum(len(set(a.versions)) == 2 for a in answers), stopped


def measured(name: str, load: Load) -> list[Figure]:
    """Both figures of one model."""
    with tempfile.TemporaryDirectory() as folder, Cluster(
        f"bench-servers-{name}", run_dir=Path(folder), num_cpus=2, object_store_bytes=200_000_000
    ) as cluster:  # fmt: skip
        cluster.reserve({"engines": PoolConfig(nodes=(1,), cpus_per_bundle=1)}, 60.0)
        group = start_engine(cluster, load)
        servers = RolloutServers([GroupReplica(group, 600.0)], deadline_seconds=600.0)
        freeze_heap()  # as a run's controller and workers do
        pairs = compare(group, servers, load)
        ratios = sorted(served / bare for served, bare in pairs)
        bad, spanning, stopped = update_under_load(group, servers, load)
        servers.close()
    return [
        Figure(
            name=f"servers_tokens_per_second_ratio, {name}",
            value=statistics.median(ratios),
            unit="ratio",
            target=TARGET_RATIO,
            better="higher",
            note=f"{load.model.dtype}; {[round(one, 3) for one in ratios]}; "
            f"tokens/s {[(round(s), round(b)) for s, b in pairs]}",
        ),
        Figure(
            name=f"servers_lost_requests_in_update, {name}",
            value=bad,
            unit="requests",
            target=0.0,
            note=f"{spanning} of {load.requests} responses span both versions, sampling stopped {stopped:.2f} s",
        ),
    ]


def main() -> int:
    """Print the table, or a JSON object a line; 0 when every target is met."""
    apply_defaults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=["tiny", "smollm2"], default=["tiny", "smollm2"])
    given = parser.parse_args()
    known = loads()
    return report([figure for name in given.only for figure in measured(name, known[name])], given.json)


if __name__ == "__main__":
    try:
        code = main()
    finally:
        if ray.is_initialized():
            ray.shutdown()
    sys.exit(code)
