"""Weight sync between real workers in real processes: two actor ranks (FSDP) and two engines, each way."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from configs.data import DataConfig, SourceConfig
from configs.model import ModelConfig, ModelShape
from configs.pools import PoolConfig
from configs.rollout import RolloutConfig
from configs.training import TrainedRoleConfig
from resources.cluster import Cluster
from resources.dispatch import Dispatch, dispatch
from resources.failures import WorkerFailed
from resources.models.weights import Bucket
from resources.weight_sync import sync_weights
from resources.worker_group import WorkerGroup, WorkerSpec, start_group, start_groups
from resources.workers.actor import ActorWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHAPE = ModelShape(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, vocab_size=104, max_positions=128)
MODEL = ModelConfig(build="tiny", shape=SHAPE)
DATA = DataConfig(
    sources=[SourceConfig(name="sort", kind="sorting", size=200)], prompts_per_iteration=8, max_prompt_length=16
)
ROLLOUT = RolloutConfig(max_response_length=6, kv_cache_bytes=4 * 2**20, bucket_bytes=40_000)


class MovingActor(ActorWorker):
    """An actor whose weights move without training."""

    @dispatch(Dispatch.BROADCAST)
    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(0.1 * torch.randn(local.shape, generator=generator))


class StumblingActor(MovingActor):
    """An actor that fails behind its first bucket until it is told not to."""

    stumbles = True

    def export_weights(self, bucket_bytes: int, wire_dtype: str | None) -> Iterator[Bucket]:
        for bucket in super().export_weights(bucket_bytes, wire_dtype):
            yield bucket
            if self.stumbles:
                raise ValueError("a layer could not be gathered")

    @dispatch(Dispatch.BROADCAST)
    def recover(self) -> None:
        self.stumbles = False


ACTOR = WorkerSpec(role="actor", worker=MovingActor, args=(MODEL, TrainedRoleConfig(), 0), threads=1)
ENGINES = WorkerSpec(
    role="rollout", worker="resources.workers.rollout:RolloutWorker", args=(ROLLOUT, MODEL, DATA, 0), threads=1
)


def check(actor: WorkerGroup, rollout: WorkerGroup, ways: list[str]) -> None:
    version = 0
    for way in ways:
        before = rollout.probe([5, 9, 20])
        actor.move(version)
        version += 1
        config = ROLLOUT.model_copy(update={"weight_sync": way})
        report = sync_weights(actor, rollout, version, config, vocab_size=104, wire_dtype="float32", timeout=60.0)
        assert report.way == way
        assert report.version == version
        assert report.probe_gap < 1e-4
        after = rollout.probe([5, 9, 20])
        assert after[0] != before[0]
        assert after[0] == after[1]
    answers = rollout.sample(0, 0, 8, 1, 0, version)
    assert [status["policy_version"] for status, _ in answers] == [version, version]
    assert sorted(row for status, _ in answers for row in status["shard"]["row_ids"]) == list(range(8))


def test_split_groups_sync_by_object_store_and_by_broadcast(cluster: Cluster) -> None:
    cluster.reserve({"train": PoolConfig(nodes=(2,)), "sample": PoolConfig(nodes=(2,))})
    actor = start_group(cluster, cluster.pools["train"], ACTOR)
    rollout = start_group(cluster, cluster.pools["sample"], ENGINES)
    check(actor, rollout, ["object_store", "process_group", "object_store"])


def test_a_broadcast_that_the_sender_breaks_off_tells_its_error_and_the_next_one_arrives(cluster: Cluster) -> None:
    cluster.reserve({"train": PoolConfig(nodes=(2,)), "sample": PoolConfig(nodes=(2,))})
    actor = start_group(cluster, cluster.pools["train"], replace(ACTOR, worker=StumblingActor))
    rollout = start_group(cluster, cluster.pools["sample"], ENGINES)
    with pytest.raises(WorkerFailed, match="a layer could not be gathered") as told:
        check(actor, rollout, ["process_group"])
    assert told.value.failure.role == "actor"
    assert told.value.failure.method == "broadcast_weights"
    actor.recover()
    actor.move(5)
    config = ROLLOUT.model_copy(update={"weight_sync": "process_group"})
    assert sync_weights(actor, rollout, 2, config, vocab_size=104, wire_dtype="float32", timeout=60.0).probe_gap < 1e-4


def test_fused_roles_hand_weights_over_in_their_process(cluster: Cluster) -> None:
    cluster.reserve({"main": PoolConfig(nodes=(2,))})
    groups = start_groups(cluster, cluster.pools["main"], [ACTOR, ENGINES], "fused")
    check(groups["actor"], groups["rollout"], ["in_process", "in_process"])
