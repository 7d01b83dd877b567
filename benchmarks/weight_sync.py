"""A weight sync of a 135M-parameter model on one node, against copying its bytes plus vLLM's own reload.

    python -m benchmarks.weight_sync [--json] [--rounds 5] [--small]

The model has SmolLM2-135M's shape and random weights in float32 (538 MB, tied head). Every sync is the whole thing:
export, transport, checksums, names, load, caches dropped, and the probe of both sides. The yardstick is taken in the
engine's own process in the same round: a copy of all bytes (`clone`, into memory of its own, as a receiver must), and
`reload_weights` from tensors of the process; both are shown. Ratios are of pairs; medians over the rounds, with the
quartiles beside them. The broadcast over gloo is reported without a target. `--small` is a model of 10 MB, to see that
the command works.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

import ray  # noqa: E402 - Ray reads the environment when it is imported
import torch  # noqa: E402

from configs.data import DataConfig, SourceConfig  # noqa: E402
from configs.model import ModelConfig, ModelShape  # noqa: E402
from configs.pools import PoolConfig  # noqa: E402
from configs.rollout import RolloutConfig  # noqa: E402
from configs.training import TrainedRoleConfig  # noqa: E402
from resources.cluster import Cluster  # noqa: E402
from resources.dispatch import Dispatch, dispatch  # noqa: E402
from resources.ray_state import set_up_local_ray  # noqa: E402
from resources.weight_sync import sync_weights  # noqa: E402
from resources.worker_group import WorkerGroup, WorkerSpec, start_group, start_groups  # noqa: E402
from resources.workers.rollout import RolloutWorker  # noqa: E402

MAX_RATIO = {"in_process": 1.2, "object_store": 1.5, "process_group": None}
SMOLLM2 = ModelShape(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    vocab_size=49_152,
    max_positions=512,
)
SMALL = ModelShape(
    num_layers=4, hidden_size=256, intermediate_size=512, num_heads=4, vocab_size=2048, max_positions=512
)
TIMEOUT = 300.0


class MeasuredRollout(RolloutWorker):
    """A rollout worker that can also do the least a sync could be."""

    _tensors: list[tuple[str, torch.Tensor]] | None = None

    @dispatch(Dispatch.BROADCAST)
    def yardstick(self, shape: ModelShape) -> tuple[float, float]:
        """Seconds of (copying all bytes, vLLM's reload of tensors of this process)."""
        if self._tensors is None:
            self._tensors = _random_weights(shape)
        started = time.perf_counter()
        copies = [tensor.clone() for _, tensor in self._tensors]
        copied = time.perf_counter()
        del copies
        begun = time.perf_counter()
        llm = self.engine._llm  # type: ignore[attr-defined] - vLLM's own call, without our checks
        head = [("lm_head.weight", tensor) for name, tensor in self._tensors if name.endswith("embed_tokens.weight")]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter([*self._tensors, *head])})
        llm.reset_prefix_cache()
        return copied - started, time.perf_counter() - begun


def _random_weights(shape: ModelShape) -> list[tuple[str, torch.Tensor]]:
    width, kv_width, inner = (
        shape.hidden_size,
        (shape.num_kv_heads or shape.num_heads) * shape.head_dim,
        shape.intermediate_size,
    )
    sizes = {"model.embed_tokens.weight": (shape.vocab_size, width), "model.norm.weight": (width,)}
    for layer in range(shape.num_layers):
        sizes |= {
            f"model.layers.{layer}.{name}.weight": size
            for name, size in {
                "self_attn.q_proj": (width, width),
                "self_attn.k_proj": (kv_width, width),
                "self_attn.v_proj": (kv_width, width),
                "self_attn.o_proj": (width, width),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
            }.items()
        }
    return [(name, 0.02 * torch.randn(size)) for name, size in sizes.items()]


@contextmanager
def groups(cluster: Cluster, model: ModelConfig, is_fused: bool) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """An actor and an engine, in one process or in two."""
    data = DataConfig(
        sources=(SourceConfig(name="sort", kind="sorting", size=64),), prompts_per_iteration=8, max_prompt_length=16
    )
    specs = [
        WorkerSpec(
            role="actor", worker="resources.workers.actor:ActorWorker", args=(model, TrainedRoleConfig(), 0), threads=1
        ),
        WorkerSpec(
            role="rollout",
            worker=MeasuredRollout,
            args=(RolloutConfig(max_response_length=16), model, data, 0),
            threads=1,
        ),
    ]
    if is_fused:
        started = start_groups(cluster, cluster.pools["main"], specs, "fused")
    else:
        started = {spec.role: start_group(cluster, cluster.pools[spec.role], spec) for spec in specs}
    yield started["actor"], started["rollout"]
    for group in started.values():
        group.shutdown()


def measure(actor: WorkerGroup, rollout: WorkerGroup, ways: list[str], shape: ModelShape, rounds: int) -> list[Figure]:
    """Yardstick and ways in turn; the first round warms up and is not counted."""
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    yardsticks: list[tuple[float, float]] = []
    num_bytes = 0
    for number in range(rounds + 1):
        copy_seconds, reload_seconds = rollout.call("yardstick", shape, timeout=TIMEOUT)[0]
        for way in ways:
            config = RolloutConfig.model_validate({"weight_sync": way})
            version = 1 + number * len(ways) + ways.index(way)
            report = sync_weights(
                actor, rollout, version, config, vocab_size=shape.vocab_size, wire_dtype="float32", timeout=TIMEOUT
            )
            num_bytes = report.num_bytes
            if number:
                ratios[way].append(report.seconds / (copy_seconds + reload_seconds))
                times[way].append(report.seconds)
        if number:
            yardsticks.append((copy_seconds, reload_seconds))
    return [_figure(way, ratios[way], times[way], yardsticks, num_bytes) for way in ways]


def _figure(
    way: str, ratios: list[float], times: list[float], yardsticks: list[tuple[float, float]], num_bytes: int
) -> Figure:
    ratio, target = statistics.median(ratios), MAX_RATIO[way]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Figure(
        name=f"sync by {way} over copy + reload",
        value=round(ratio, 3),
        unit="ratio",
        target=target,
        better="lower",
        note=(
            f"quartiles {low:.2f} to {high:.2f}; sync {statistics.median(times):.3f} s, copy "
            f"{statistics.median(pair[0] for pair in yardsticks):.3f} s, reload "
            f"{statistics.median(pair[1] for pair in yardsticks):.3f} s, {num_bytes / 2**20:.0f} MiB"
        ),
    )


def main() -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape = SMALL if options.small else SMOLLM2
    model = ModelConfig(build="tiny", shape=shape)
    figures: list[Figure] = []
    set_up_local_ray()
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1_500_000_000
    )
    with tempfile.TemporaryDirectory() as folder:
        for is_fused, ways in ((True, ["in_process"]), (False, ["object_store", "process_group"])):
            with Cluster(f"bench-{int(is_fused)}", run_dir=Path(folder)) as cluster:
                pools = ["main"] if is_fused else ["actor", "rollout"]
                cluster.reserve({pool: PoolConfig(nodes=(1,)) for pool in pools})
                with groups(cluster, model, is_fused) as (actor, rollout):
                    figures += measure(actor, rollout, ways, shape, options.rounds)
    ray.shutdown()
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
