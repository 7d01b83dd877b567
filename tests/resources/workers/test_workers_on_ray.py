"""The same workers as real Ray actors on a real pool: scored and trained by reference, equal to one process."""

import pytest
import ray
import torch

from configs.pools import PoolConfig
from configs.training import TrainedRoleConfig
from resources.ranks import Mesh
from resources.rows import Rows, ShardRef
from resources.worker_group import start_group
from resources.worker_spec import WorkerSpec
from tests.resources.workers.tiny import MODEL, OPTIMIZER, PPO, TEMPERATURE, actor, logged, make_rows, plans, scored

SETTINGS = TrainedRoleConfig(optimizer=OPTIMIZER, micro_batch_size=3)


def by_reference(rows):
    return ShardRef(ray.put(rows), tuple(rows["row_ids"].tolist()), tuple(sorted(rows.keys())))


def shard_refs(answers):
    return [
        ShardRef(data, tuple(status["shard"]["row_ids"]), tuple(status["shard"]["columns"])) for status, data in answers
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Zero-copy tensor serialization", "ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_two_ray_workers_score_and_train_as_one_process(cluster, sequence_parallel):
    rows = make_rows(7)
    alone = actor()
    expected_rows = scored(alone, rows)
    expected = logged([alone.update(expected_rows, plans(rows)[0], PPO, TEMPERATURE)["metrics"]])

    cluster.reserve({"main": PoolConfig(nodes=(2,), cpus_per_bundle=1.0)})
    spec = WorkerSpec(
        role="actor",
        worker="resources.workers.actor:ActorWorker",
        args=(MODEL, SETTINGS, 0),
        kwargs={"threads": 1, "sequence_parallel": sequence_parallel},
        mesh=Mesh(sp=sequence_parallel),
    )
    group = start_group(cluster, cluster.pools["main"], spec)
    whole = by_reference(rows)
    ids = rows["row_ids"].tolist()
    answers = group.compute_log_probs(Rows([whole], ids), TEMPERATURE)
    answers = [answer for answer in answers if answer[1] is not None]
    assert all(isinstance(data, ray.ObjectRef) for _, data in answers), "the caller holds references, never the data"
    refs = shard_refs(answers)
    assert sorted(row for ref in refs for row in ref.row_ids) == ids
    found = Rows(refs, ids).load(("old_log_probs",))
    torch.testing.assert_close(
        found["old_log_probs"].values(), expected_rows["old_log_probs"].values(), atol=1e-5, rtol=1e-5
    )

    together = Rows([whole, *[ShardRef(ref.data, ref.row_ids, ref.columns) for ref in refs]], ids)
    dp_size = 2 // sequence_parallel
    per_rank = [
        plan for plan in plans(rows, dp_size=dp_size, first_ratio_tolerance=1e-5) for _ in range(sequence_parallel)
    ]
    statuses = group.update(
        [together.select(plan.row_ids) for plan in per_rank], per_rank, PPO, temperature=TEMPERATURE
    )
    metrics = logged([status["metrics"] for status in statuses])
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert group.checksum()[0].keys() == alone.checksum().keys()
    group.shutdown()
