"""The reward worker: which text graders see, how scores come out, and that a failed grader is never a reward of 0."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from configs.reward import GraderConfig, RewardConfig
from resources.batch import make_shard, ragged_from_rows
from resources.graders import Grader
from resources.models.character_tokenizer import build_character_tokenizer, save_character_tokenizer
from resources.reward_scores import LOST
from resources.workers.reward import RewardWorker, finished_rows, load_decoder

GRADERS = """
def right(response, answer): return float(response == answer)
def fragile(response):
    if response == "bad": raise RuntimeError("no verdict")
    return float(len(response))
def longest(responses):
    return [float(len(one) == max(len(other) for other in responses)) for one in responses]
def spy(response, extra): return 1.0 if response == extra["expected"] else 0.0
"""
TOKENIZER = build_character_tokenizer()


@pytest.fixture
def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardWorker]]:
    (tmp_path / "worker_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_character_tokenizer(tmp_path / "tokenizer")
    workers: list[RewardWorker] = []

    def make(*graders: Grader, rank: int = 0, world_size: int = 1, **reward: Any) -> RewardWorker:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        placeholder = GraderConfig(name="unused", function="exact_answer")
        config = RewardConfig(graders=(placeholder,), processes=1, **reward)
        workers.append(RewardWorker(config, tmp_path / "tokenizer", graders))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def grader(function: str, name: str = "g", **more: Any) -> Grader:
    return Grader(name=name, kind="python", function=f"worker_graders:{function}", **more)


def batch(
    responses: Sequence[str],
    answer: str = "4",
    groups: Sequence[int] | None = None,
    reasons: Sequence[int] | None = None,
) -> TensorDict:
    """Rows 10, 11, ... with the prompt `2+2=` and all response tokens sampled."""
    prompt = TOKENIZER.encode("2+2=")
    rows = [prompt + TOKENIZER.encode(text) + [TOKENIZER.eos_token_id] for text in responses]
    record = json.dumps({"prompt": "2+2=", "answer": answer, "source": "sums", "index": 0, "extra": {}}).encode()
    count = len(responses)
    return make_shard(
        {
            "row_ids": torch.arange(10, 10 + count),
            "group_ids": torch.tensor(groups or list(range(count))),
            "record": ragged_from_rows([torch.tensor(list(record))] * count, torch.uint8),
            "input_ids": ragged_from_rows([torch.tensor(row) for row in rows], torch.int64),
            "response_mask": ragged_from_rows([torch.arange(len(row)) >= len(prompt) for row in rows], torch.bool),
            "finish_reasons": torch.tensor(reasons or [0] * count, dtype=torch.int8),
            "response_lengths": torch.tensor([len(row) - len(prompt) for row in rows]),
        }
    )


def test_a_score_a_row_with_its_ids(make_worker: Callable[..., RewardWorker]):
    status, shard = make_worker(grader("right")).score("b", batch(["4", "5", "4"]))
    assert shard["row_ids"].tolist() == [10, 11, 12]
    assert shard["scores"].tolist() == [1.0, 0.0, 1.0]
    assert shard["scores"].dtype == torch.float32
    assert (status["metrics"]["reward/score_mean"], status["metrics"]["reward/score_mean/count"]) == (2.0, 3.0)


def test_tool_output_and_special_tokens_are_not_graded(make_worker: Callable[..., RewardWorker]):
    rows = batch(["final"])
    ids = rows.get("input_ids").values().tolist()[:-1] + TOKENIZER.encode("LEAK") + [TOKENIZER.eos_token_id]
    mask = [False] * 4 + [True] * 5 + [False] * 4 + [True]
    rows.set("input_ids", ragged_from_rows([torch.tensor(ids)], torch.int64))
    rows.set("response_mask", ragged_from_rows([torch.tensor(mask)], torch.bool))
    assert load_decoder_of(finished_rows(rows)[0].response_ids) == "final"
    record = json.dumps({"prompt": "", "answer": "final", "source": "", "extra": {"expected": "final"}}).encode()
    rows.set("record", ragged_from_rows([torch.tensor(list(record))], torch.uint8))
    _, shard = make_worker(grader("right"), grader("spy", name="s")).score("b", rows)
    assert shard["scores"].tolist() == [2.0]


def load_decoder_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def test_a_failed_grader_gives_nan_and_a_count_by_cause(make_worker: Callable[..., RewardWorker]):
    status, shard = make_worker(grader("fragile")).score("b", batch(["bad", "ok"]))
    assert math.isnan(shard["scores"][0])
    assert shard["scores"][1] == 2.0
    metrics = status["metrics"]
    assert (metrics["reward/unscorable"], metrics["reward/unscorable_error"], metrics["reward/unscorable_timeout"]) == (
        1,
        1,
        0,
    )
    assert status["causes"] == ["grader 'g', error: row 10: worker_graders:fragile raised RuntimeError: no verdict"]


def test_a_truncated_response_has_its_own_score_and_a_finished_one_keeps_its(make_worker: Callable[..., RewardWorker]):
    worker = make_worker(grader("right"), truncated_score=-0.5)
    rows = batch(["4", "4"], reasons=[1, 0])
    status, shard = worker.score("b", rows)
    assert shard["scores"].tolist() == [-0.5, 1.0]
    assert status["metrics"]["reward/truncated_fraction"] == 1.0
    assert worker.score("v", rows, is_validation=True)[1]["scores"].tolist() == [1.0, 1.0]


def with_a_lost_row(rows: TensorDict, lost: int) -> TensorDict:
    """Nobody answered row `lost`: it has no sampled token, though tokens may stand behind its prompt."""
    masks = [mask & (place != lost) for place, mask in enumerate(rows.get("response_mask").unbind())]
    return rows.copy().set("response_mask", ragged_from_rows(masks, torch.bool))


@pytest.mark.parametrize("is_validation", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_that_nobody_answered_is_unscorable_and_seen_by_no_grader(
    make_worker: Callable[..., RewardWorker], is_streamed: bool, is_validation: bool
):
    """Rows 11 and 12 were both ended from outside, and row 12 holds what was sampled until then."""
    worker, rows = make_worker(grader("fragile"), truncated_score=-1.0), batch(["4", "4", "4"], reasons=[0, 2, 2])
    rows = with_a_lost_row(rows, 1)
    if is_streamed:
        worker.begin("b", finished_rows(rows))
    status, shard = worker.score("b", rows, is_validation=is_validation)
    assert [None if math.isnan(score) else score for score in shard["scores"].tolist()] == [1.0, None, 1.0]
    metrics = status["metrics"]
    assert (metrics["reward/unscorable"], metrics["reward/unscorable_lost"]) == (1.0, 1.0)
    assert (metrics["reward/score_mean"], metrics["reward/score_mean/count"]) == (2.0, 2.0)
    assert (status["moments"]["count"], status["lost_groups"]) == (2, [1])
    assert len(status["graders"][0]["seconds"]) == 2
    assert status["causes"] == [LOST]


def test_siblings_of_a_response_that_nobody_answered_are_compared_without_it(make_worker: Callable[..., RewardWorker]):
    worker = make_worker(grader("longest", is_group_wise=True))
    rows = with_a_lost_row(batch(["1", "22", "333"], groups=[5, 5, 5], reasons=[0, 0, 2]), 2)
    worker.begin("b", finished_rows(rows))
    status, shard = worker.score("b", rows)
    assert shard["scores"].tolist()[:2] == [0.0, 1.0]
    assert math.isnan(shard["scores"][2])
    assert status["lost_groups"] == [5]


def test_a_rank_whose_responses_nobody_answered_has_nothing_to_grade(make_worker: Callable[..., RewardWorker]):
    status, shard = make_worker(grader("right")).score("b", with_a_lost_row(batch(["4"], reasons=[2]), 0))
    assert math.isnan(shard["scores"][0])
    assert (status["moments"]["count"], status["graders"]) == (0, [])


def test_what_was_begun_is_not_graded_twice(make_worker: Callable[..., RewardWorker]):
    worker, rows = make_worker(grader("right")), batch(["4", "5", "4"])
    worker.begin("b", finished_rows(rows)[:2])
    status, shard = worker.score("b", rows)
    assert shard["scores"].tolist() == [1.0, 0.0, 1.0]
    assert len(status["graders"][0]["seconds"]) == 3


def test_ranks_share_the_groups_and_siblings_stay_together(make_worker: Callable[..., RewardWorker]):
    rows = batch(["1", "22", "333", "4"], groups=[0, 0, 1, 1])
    found = {}
    for rank in range(2):
        _, shard = make_worker(grader("longest", is_group_wise=True), rank=rank, world_size=2).score("b", rows)
        found |= dict(zip(shard["row_ids"].tolist(), shard["scores"].tolist(), strict=True))
    assert found == {10: 0.0, 11: 1.0, 12: 1.0, 13: 0.0}


def test_a_rank_without_groups_gives_an_empty_shard(make_worker: Callable[..., RewardWorker]):
    _, shard = make_worker(grader("right"), rank=1, world_size=2).score("b", batch(["4"]))
    assert shard.batch_size == (0,)


def test_weights_clipping_and_external_scores_add_up(make_worker: Callable[..., RewardWorker]):
    model = Grader(name="m", kind="model", weight=0.5)
    worker = make_worker(grader("fragile", weight=2.0), model, clip=3.0)
    external = {"m": make_shard({"row_ids": torch.tensor([11, 10]), "scores": torch.tensor([1.0, math.nan])})}
    _, shard = worker.score("b", batch(["x", "yy"]), external)
    assert math.isnan(shard["scores"][0])
    assert shard["scores"][1] == 3.0


def test_normalisation_divides_by_the_running_deviation_and_its_state_returns(make_worker: Callable[..., RewardWorker]):
    worker = make_worker(grader("fragile"), normalise=True)
    status, shard = worker.score("b", batch(["x", "xxx"]))
    assert shard["scores"].tolist() == [1.0, 3.0]
    state = worker.state()
    assert worker.normalise("b", status["moments"])[1]["scores"].tolist() == [1.0, 3.0]
    again, _ = worker.score("c", batch(["x" * 5, "x" * 7]))
    deviation = math.sqrt(5.0)
    expected = [pytest.approx(5 / deviation), pytest.approx(7 / deviation)]
    assert worker.normalise("c", again["moments"])[1]["scores"].tolist() == expected
    worker.load_state(state)
    assert worker.state()["count"] == 0


def test_a_folder_and_a_model_decode_alike(tmp_path: Path):
    save_character_tokenizer(tmp_path)
    ids = [*TOKENIZER.encode("so 4"), TOKENIZER.eos_token_id]
    assert load_decoder(tmp_path)(ids) == "so 4"
