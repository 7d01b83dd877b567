"""Rollout servers against one bare LLM.generate call on the same requests, and a weight update under load.

`python -m benchmarks.servers [--json]`. The servers and the bare call use the same engine process in turn, pairwise,
so that both meet the same machine; the ratio is the median of the pairs.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import ray

from benchmarks.figure import Figure, report
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
REQUESTS, SLOTS = 512, 128
"""Four waves, so that a pair lasts seconds and not its first and last call."""
UPDATE_AFTER_SECONDS = 0.3
MIN_TOKENS, MAX_TOKENS = 24, 72
"""Responses of many lengths, so that one ends in nearly every step, as they do in a rollout."""
SHAPE = ModelShape(num_layers=2, hidden_size=128, intermediate_size=512, num_heads=4, vocab_size=128, max_positions=128)
SAMPLING = Sampling()


def requests(first: int, count: int = REQUESTS) -> list[GenerationRequest]:
    """Prompts of 16 tokens that share nothing; responses of exactly `max_tokens`, 48 on average."""
    return [
        GenerationRequest(
            row_id=first + n,
            prompt_ids=tuple(4 + (7 * n + 13 * k + first) % 90 for k in range(16)),
            seed=first + n,
            max_tokens=MIN_TOKENS + 7 * n % (MAX_TOKENS - MIN_TOKENS + 1),
        )
        for n in range(count)
    ]


def start_engine(cluster: Cluster) -> WorkerGroup:
    """One vLLM engine in a worker process of its own."""
    data = DataConfig(sources=(SourceConfig(name="s", kind="sorting", size=600),), prompts_per_iteration=8)
    rollout = RolloutConfig(
        max_running_sequences=SLOTS, max_model_length=128, kv_cache_bytes=64 * 2**20,
        servers=ServersConfig(enabled=True), enable_prefix_caching=False,
    )  # fmt: skip
    model = ModelConfig(build="tiny", shape=SHAPE)
    spec = WorkerSpec(
        role="rollout",
        worker="benchmarks.server_workers:ComparedWorker",
        args=(rollout, model, data, 0),
        kwargs={"threads": 1},
        threads=1,
        call_seconds=600.0,
    )
    return start_group(cluster, cluster.pools["engines"], spec)


def compare(group: WorkerGroup, servers: RolloutServers) -> list[tuple[float, float]]:
    """Tokens a second of (servers, bare call), pair by pair, the order changing."""
    servers.generate(requests(10**6), SAMPLING)  # warm, and the steps a call takes settle
    group.call("bare_generate", requests(2 * 10**6), SAMPLING)
    pairs: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        asked = requests(10_000 * pair)
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


def update_under_load(group: WorkerGroup, servers: RolloutServers) -> tuple[int, int, float]:
    """(requests lost or wrong, requests that span both versions, seconds without sampling) of an update on the way."""
    asked = requests(5 * 10**6)
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


def main() -> int:
    """Print the table, or a JSON object a line; 0 when every target is met."""
    apply_defaults()
    with tempfile.TemporaryDirectory() as folder, Cluster(
        "bench-servers", run_dir=Path(folder), num_cpus=2, object_store_bytes=200_000_000
    ) as cluster:  # fmt: skip
        cluster.reserve({"engines": PoolConfig(nodes=(1,), cpus_per_bundle=1)}, 60.0)
        group = start_engine(cluster)
        servers = RolloutServers([GroupReplica(group, 600.0)], deadline_seconds=600.0)
        freeze_heap()  # as a run's controller and workers do
        pairs = compare(group, servers)
        ratios = sorted(served / bare for served, bare in pairs)
        bad, spanning, stopped = update_under_load(group, servers)
        servers.close()
    figures = [
        Figure(
            name="servers_tokens_per_second_ratio",
            value=statistics.median(ratios),
            unit="ratio",
            target=TARGET_RATIO,
            better="higher",
            note=f"{[round(one, 3) for one in ratios]}; tokens/s {[(round(s), round(b)) for s, b in pairs]}",
        ),
        Figure(
            name="servers_lost_requests_in_update",
            value=bad,
            unit="requests",
            target=0.0,
            note=f"{spanning} of {REQUESTS} responses span both versions, sampling stopped {stopped:.2f} s",
        ),
    ]
    return report(figures, "--json" in sys.argv)


if __name__ == "__main__":
    try:
        code = main()
    finally:
        if ray.is_initialized():
            ray.shutdown()
    sys.exit(code)
