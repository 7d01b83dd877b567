"""The reward step on real reward workers: streamed or not, on one rank or two, the scores are the same."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

from configs.algorithm import AlgorithmConfig
from configs.data import DataConfig, SourceConfig
from configs.pools import PoolConfig
from configs.reward import GraderConfig, RewardConfig
from configs.training import RecoveryConfig
from resources.batch import make_shard, ragged_from_rows
from resources.cluster import Cluster
from resources.graders import Grader
from resources.models.character_tokenizer import build_character_tokenizer, save_character_tokenizer
from resources.ray_state import enable_zero_copy_tensors
from resources.reward_stream import RewardStream
from resources.rows import ShardRef
from resources.store import BatchHandle, BatchStore, StoreView
from resources.worker_group import WorkerGroup, WorkerSpec, start_group
from resources.workers.reward import RewardWorker, finished_rows
from tasks.host import HostContext, use_host
from tasks.reward import NothingScoredError, reward
from tasks.stamp import Stamp
from tasks.step import StepResult

GRADERS = """
import time

def right(response, answer): return float(response == answer)
def length(response): return float(len(response))
def rank(responses): return [float(len(one) == max(map(len, responses))) for one in responses]
def slow(response): time.sleep(0.2); return 1.0
def broken(response): raise RuntimeError("no verdict")
"""
# Ray and torch warn of tensors in shared memory, which nobody may write into; nobody does here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Zero-copy tensor serialization"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
AT = Stamp(iteration=3, attempt=1, policy_version=3, epoch=0, start=0, count=3, kl_coef=0.0)
TOKENIZER = build_character_tokenizer()


class Settings:
    """Of a run's config, the part the step reads."""

    def __init__(self, config: RewardConfig) -> None:
        self.reward = config
        self.recovery = RecoveryConfig()
        self.algorithm = AlgorithmConfig()
        self.data = DataConfig(sources=(SourceConfig(name="s", kind="sorting"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the user's graders and the tokenizer."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "step_graders.py").write_text(GRADERS)
    save_character_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def home(folder: Path, ray_session: None) -> Iterator[Cluster]:
    enable_zero_copy_tensors()
    with Cluster("reward-step", run_dir=folder) as cluster:
        cluster.reserve({"one": PoolConfig(nodes=(1,)), "two": PoolConfig(nodes=(2,))})
        yield cluster


@pytest.fixture
def run_step(home: Cluster, folder: Path) -> Iterator[Callable[..., tuple[StepResult, list[float]]]]:
    """Runs the step on a pool and gives its result and the scores by row id."""
    groups: list[WorkerGroup] = []

    def run(
        rows: TensorDict, *graders: Grader, pool: str = "two", streamed: int = 0, repeats: int = 1, **config: Any
    ) -> tuple[StepResult, list[float]]:
        settings = RewardConfig(graders=(GraderConfig(name="unused", function="exact_answer"),), **config)
        spec = WorkerSpec(
            role="reward",
            worker=RewardWorker,
            args=(settings, str(folder / "tokenizer")),
            kwargs={"graders": graders},
            env={"PYTHONPATH": str(folder)},
            rendezvous=False,
        )
        groups.append(start_group(home, home.pools[pool], spec))
        for number in range(repeats):
            store = BatchStore(pool)
            context = HostContext(pool=pool, run_id="r", store=StoreView(store), config=Settings(settings))
            context.groups["reward"] = groups[-1]
            at = replace(AT, iteration=number)
            batch_id = at.batch_id
            shards = [ShardRef(ray.put(rows), tuple(rows["row_ids"].tolist()), tuple(sorted(rows.keys())))]
            handle = store.add(batch_id, shards)
            RewardStream(groups[-1], batch_id)(finished_rows(rows)[:streamed])
            with use_host(context):
                result = reward.fn(at, handle)
        scores = context.store.rows([BatchHandle(pool=pool, batch_id=batch_id)], ["scores"]).load()["scores"]
        groups.pop().shutdown()
        return result, scores.tolist()

    yield run
    for group in groups:
        group.shutdown()


def grader(function: str, name: str = "g", **more: Any) -> Grader:
    return Grader(name=name, kind="python", function=f"step_graders:{function}", **more)


def batch(*responses: str, group_size: int = 2) -> TensorDict:
    prompt = TOKENIZER.encode("2+2=")
    rows = [prompt + TOKENIZER.encode(text) + [TOKENIZER.eos_token_id] for text in responses]
    record = json.dumps({"prompt": "2+2=", "answer": "4", "source": "sums", "index": 0, "extra": {}}).encode()
    count = len(responses)
    return make_shard(
        {
            "row_ids": torch.arange(count),
            "group_ids": torch.arange(count) // group_size,
            "record": ragged_from_rows([torch.tensor(list(record))] * count, torch.uint8),
            "input_ids": ragged_from_rows([torch.tensor(row) for row in rows], torch.int64),
            "response_mask": ragged_from_rows([torch.arange(len(row)) >= len(prompt) for row in rows], torch.bool),
            "finish_reasons": torch.zeros(count, dtype=torch.int8),
            "response_lengths": torch.tensor([len(row) - len(prompt) for row in rows]),
        }
    )


def test_scores_are_the_same_streamed_or_not_on_one_rank_or_two(run_step: Callable[..., Any]):
    rows = batch("4", "5", "44", "4", "4", "444")
    graders = [grader("right"), grader("rank", name="r", is_group_wise=True, weight=0.5)]
    expected = [1.5, 0.5, 0.5, 1.0, 1.0, 0.5]
    for pool, streamed in (("one", 0), ("one", 6), ("two", 0), ("two", 4)):
        _, scores = run_step(rows, *graders, pool=pool, streamed=streamed)
        assert scores == expected, (pool, streamed)


def test_metrics_spans_and_latencies_come_with_the_result(run_step: Callable[..., Any]):
    result, scores = run_step(
        batch("4", "5", "4", "7"), grader("right"), grader("broken", name="b", sources=("other",))
    )
    assert scores == [1.0, 0.0, 1.0, 0.0]
    assert result.metrics["reward/score_mean"] == 0.5
    assert result.metrics["reward/score_std"] == 0.5
    assert result.metrics["reward/unscorable"] == 0.0
    [latency] = result.facts["graders"]
    assert (latency["name"], latency["kind"], latency["calls"], latency["timeouts"]) == ("g", "python", 4, 0)
    assert {"p50_seconds", "p95_seconds", "max_seconds", "slow_calls"} <= latency.keys()
    assert result.facts["rows"] == 4
    assert [(span.rank, span.facts["rows"]) for span in result.spans] == [(0, 2), (1, 2)]


def test_grading_under_the_rollout_is_hidden(run_step: Callable[..., Any]):
    result, _ = run_step(batch("4", "5"), grader("slow"), pool="one", streamed=2)
    assert result.facts["hidden_seconds"] >= 0.0
    assert result.facts["graders"][0]["calls"] == 2


def test_a_batch_that_nobody_could_score_stops_with_the_causes(run_step: Callable[..., Any]):
    with pytest.raises(NothingScoredError, match=r"none of 2 responses could be scored: .*step_graders:broken raised"):
        run_step(batch("4", "5"), grader("broken"), pool="one")


def test_normalisation_is_the_same_on_every_rank_and_its_state_is_told(run_step: Callable[..., Any]):
    rows = batch("1", "1", "333", "333")
    result, scores = run_step(rows, grader("length"), repeats=2, normalise=True)
    assert scores == [1.0, 1.0, 3.0, 3.0]
    assert result.facts["state"] == {"count": 8, "mean": 2.0, "squares": 8.0}
    assert result.metrics["reward/score_mean"] == 2.0
    assert math.isclose(result.metrics["reward/score_std"], 1.0)
