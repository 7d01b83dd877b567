"""The rollout worker: whose rows, which ids, which columns, and what streams out."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.data import DataConfig, SourceConfig, ValidationConfig
from configs.model import ModelConfig, ModelShape
from configs.rollout import RolloutConfig, SamplingConfig, ScriptedConfig, ToolsConfig
from resources.batch import concat_rows, row_lengths, select_rows, validate
from resources.dispatch import marked_methods
from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.engines.scripted import ScriptedEngine
from resources.graders import FinishedRow
from resources.models.causal_lm import load_tokenizer
from resources.prompt_sources import PromptError
from resources.replicas import LocalReplica
from resources.request_serving import ServesRequests
from resources.rollout_rows import records_of
from resources.rollout_servers import RolloutServers
from resources.served_engine import ServedEngine
from resources.workers.rollout import RolloutWorker, _lost
from tasks.algorithms.advantage_step import estimate_advantages
from tasks.algorithms.diagnostics import finish_metrics
from tasks.on_rows import advantages_of_rows
from tasks.replies import add_sums
from tasks.rollout import ROLLOUT_COLUMNS

SHAPE = ModelShape(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, vocab_size=104, max_positions=128)
MODEL = ModelConfig(build="tiny", shape=SHAPE)
DATA = DataConfig(
    sources=[SourceConfig(name="sort", kind="sorting", size=200)], prompts_per_iteration=8, max_prompt_length=16
)
VALIDATION = ValidationConfig(sources=[SourceConfig(name="held", kind="sorting", size=20)], num_prompts=20)
SCRIPT = ScriptedConfig(responses={"mode": "answer", "accuracy": 1.0})


def build(rank: int = 0, world_size: int = 1, *, seed: int = 0, data: DataConfig = DATA, **rollout) -> RolloutWorker:
    """A worker of one rank; scripted unless an engine is named."""
    settings = {"engine": "scripted", "scripted": SCRIPT, "max_response_length": 8, **rollout}
    if settings["engine"] != "scripted":
        settings["scripted"] = None
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", str(rank))
        environment.setenv("WORLD_SIZE", str(world_size))
        return RolloutWorker(RolloutConfig(**settings), MODEL, data, seed, validation=VALIDATION)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Built models go into a folder of the tests."""
    import resources.models.causal_lm as causal_lm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm.prepare_model_folder, "__defaults__", (tmp_path_factory.mktemp("cache"),))
        yield


@pytest.fixture(scope="module")
def scripted() -> RolloutWorker:
    return build()


@pytest.fixture(scope="module")
def real() -> RolloutWorker:
    """One vLLM engine of one."""
    return build(engine="vllm", max_running_sequences=32, kv_cache_bytes=4 * 2**20)


def test_rows_stand_group_by_group(scripted):
    # two prompts, three responses each.
    _, shard = scripted.sample(0, 0, 2, 1, 0)
    assert shard["group_ids"].tolist() == [0, 1]
    worker = build(group_size=3)
    _, shard = worker.sample(0, 0, 2, 3, 0)
    assert shard["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert shard["row_ids"].tolist() == [0, 1, 2, 3, 4, 5]


def test_responses_per_prompt_are_not_multiplied_twice():
    # two prompts, four responses: eight rows.
    _, shard = build(group_size=4).sample(0, 0, 2, 4, 0)
    assert shard.batch_size[0] == 8


def test_no_two_iterations_share_a_row_id():
    worker = build(group_size=2)
    ids: list[int] = []
    epoch, start = 0, 0
    for iteration in range(60):  # 480 prompts of 200 an epoch
        status, shard = worker.sample(epoch, start, 8, 2, iteration)
        epoch, start = status["next_position"]["epoch"], status["next_position"]["start"]
        ids += shard["row_ids"].tolist()
    assert len(set(ids)) == len(ids) == 960
    assert (epoch, start) == (2, 80)


def test_a_shard_has_the_promised_columns_and_is_valid(scripted):
    status, shard = scripted.sample(0, 0, 8, 1, 0)
    validate(shard, ["row_ids", "group_ids", *ROLLOUT_COLUMNS])
    assert set(shard.keys()) == {"row_ids", "group_ids", *ROLLOUT_COLUMNS}
    assert status["rows"]["row_ids"] == shard["row_ids"].tolist()


def test_masks_cover_exactly_the_sampled_tokens(scripted):
    # the mask comes from lengths, not from a pad or stop id; a response cut at the limit has no stop token.
    status, shard = build(max_response_length=3).sample(0, 0, 8, 1, 0)
    assert shard["response_lengths"].tolist() == [3] * 8
    assert status["metrics"]["rollout/truncated_fraction"] == 8
    masks = shard.get("response_mask").unbind()
    for mask, prompt in zip(masks, shard["prompt_lengths"].tolist(), strict=True):
        assert mask.tolist() == [False] * prompt + [True] * 3
    log_probs, mask = shard.get("rollout_log_probs").values(), shard.get("response_mask").values()
    assert bool((log_probs[~mask] == 0).all())
    assert bool((log_probs[mask] < 0).all())


def test_records_carry_source_answer_and_index(scripted):
    _, shard = scripted.sample(0, 0, 1, 1, 0)
    record = json.loads(bytes(shard.get("record").unbind()[0].tolist()))
    assert record["source"] == "sort"
    assert record["answer"] == "".join(sorted(record["prompt"][:-1]))
    response = shard.get("input_ids").unbind()[0][int(shard["prompt_lengths"][0]) :].tolist()
    assert scripted.tokenizer.decode(response, skip_special_tokens=True) == record["answer"]


def test_each_group_belongs_to_one_engine_whatever_the_rank_count():
    _, whole = build().sample(0, 0, 8, 1, 0)
    parts = [build(rank, 3).sample(0, 0, 8, 1, 0)[1] for rank in range(3)]
    assert [part["group_ids"].tolist() for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    joined = select_rows(concat_rows(parts), whole["row_ids"])
    assert torch.equal(joined.get("input_ids").values(), whole.get("input_ids").values())
    assert torch.equal(joined.get("rollout_log_probs").values(), whole.get("rollout_log_probs").values())


def test_an_engine_without_rows_answers_with_an_empty_shard():
    status, shard = build(2, 3).sample(0, 0, 2, 1, 0)
    assert shard.batch_size[0] == 0
    assert status["metrics"]["rollout/rows"] == 0
    validate(shard, ROLLOUT_COLUMNS)


def test_a_source_may_ask_for_a_group_size_of_its_own():
    sources = [
        SourceConfig(name="a", kind="sorting", size=20),
        SourceConfig(name="b", kind="sorting", size=20, seed=1, group_size=3),
    ]
    worker = build(data=DATA.model_copy(update={"sources": sources}), group_size=2)
    _, shard = worker.sample(0, 0, 4, 2, 0)
    assert shard["group_ids"].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert shard["row_ids"].tolist() == [0, 1, 3, 4, 5, 6, 7, 9, 10, 11]


def test_greedy_baseline_rows_cannot_be_taken_for_sampled_ones(scripted):
    _, shard = scripted.sample(0, 4, 3, 1, 0, greedy=True)
    assert shard["row_ids"].tolist() == [-5, -6, -7]
    assert shard["group_ids"].tolist() == [4, 5, 6]


def test_rows_stream_out_once_each_with_what_graders_need():
    seen: list[FinishedRow] = []
    worker = build(group_size=2, max_running_sequences=4)
    _, shard = worker.sample(0, 0, 8, 2, 0, stream=seen.extend)
    assert sorted(row.row_id for row in seen) == shard["row_ids"].tolist()
    one = next(row for row in seen if row.row_id == 3)
    position = shard["row_ids"].tolist().index(3)
    sampled = shard.get("input_ids").unbind()[position][shard.get("response_mask").unbind()[position]]
    assert one.response_ids == tuple(sampled.tolist())
    assert (one.group_id, one.group_size, one.response_length) == (1, 2, len(one.response_ids))


def test_skipped_prompts_do_not_come(scripted):
    first, _ = scripted.sample(0, 0, 4, 1, 0)
    skipped = first["rows"]["prompt_keys"][:2]
    status, shard = scripted.sample(0, 0, 4, 1, 0, skip=skipped)
    assert shard["group_ids"].tolist() == [2, 3, 4, 5]
    assert not set(skipped) & set(status["rows"]["prompt_keys"])


def test_another_policy_version_than_asked_for_is_refused(scripted):
    with pytest.raises(RuntimeError, match=r"holds policy version 0; version 3 was asked for"):
        scripted.sample(0, 0, 4, 1, 0, 3)


def test_validation_prompts_are_the_same_each_time_and_held_out(scripted):
    (_, first), (_, second) = scripted.evaluate(20, 2), scripted.evaluate(20, 2)
    assert torch.equal(first.get("input_ids").values(), second.get("input_ids").values())
    trained = {prompt.text for prompt in scripted.prompts.rows(0, 0, 200).prompts}
    records = [json.loads(bytes(record.tolist())) for record in first.get("record").unbind()]
    assert not trained & {record["prompt"] for record in records}
    with pytest.raises(PromptError, match="num_prompts is 21 but only 20"):
        scripted.evaluate(21)


def test_a_resumed_position_is_that_of_the_same_data(scripted):
    status, _ = scripted.sample(0, 0, 6, 1, 0)
    saved = status["next_position"]
    assert scripted.resume_position(saved) == saved == {"epoch": 0, "start": 6, "identity": saved["identity"]}
    other = build(data=DATA.model_copy(update={"sources": [SourceConfig(name="s", kind="sorting", size=99)]}))
    begun_anew = other.resume_position(saved)
    assert (begun_anew["epoch"], begun_anew["start"]) == (0, 0)
    assert begun_anew["identity"] != saved["identity"]


def test_ranks_that_do_not_divide_into_engines_are_refused():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="3 rollout ranks do not divide"):
            RolloutWorker(RolloutConfig(), MODEL, DATA, 0, tensor_parallel=2)


def test_methods_called_by_tasks_are_marked():
    marked = marked_methods(RolloutWorker)
    assert {"sample", "evaluate", "probe", "sleep", "wake", "load_weight_bucket", "receive_from_sibling"} <= set(marked)
    assert marked["sample"].marking.bulk


# With the real engine


def test_two_engines_sample_what_one_samples(real):
    _, whole = real.sample(0, 0, 8, 1, 0)
    parts = [build(rank, 2, engine="vllm", kv_cache_bytes=4 * 2**20).sample(0, 0, 8, 1, 0)[1] for rank in range(2)]
    joined = select_rows(concat_rows(parts), whole["row_ids"])
    assert torch.equal(joined.get("input_ids").values(), whole.get("input_ids").values())
    torch.testing.assert_close(
        joined.get("rollout_log_probs").values(), whole.get("rollout_log_probs").values(), atol=1e-5, rtol=0
    )


def test_a_replay_is_bit_equal_and_another_iteration_is_not(real):
    runs = [real.sample(0, 0, 8, 1, iteration)[1] for iteration in (4, 4, 5)]
    ids = [run.get("input_ids").values() for run in runs]
    assert torch.equal(ids[0], ids[1])
    assert torch.equal(runs[0].get("rollout_log_probs").values(), runs[1].get("rollout_log_probs").values())
    assert ids[0].shape != ids[2].shape or not torch.equal(ids[0], ids[2])


def test_the_run_seed_changes_responses_and_not_the_order_of_prompts(real):
    other = build(seed=0, engine="vllm", kv_cache_bytes=4 * 2**20, seed_offset=1)
    (_, mine), (_, theirs) = real.sample(0, 0, 8, 1, 0), other.sample(0, 0, 8, 1, 0)
    assert torch.equal(mine.get("record").values(), theirs.get("record").values())
    ids = [shard.get("input_ids").values() for shard in (mine, theirs)]
    assert ids[0].shape != ids[1].shape or not torch.equal(*ids)


def test_every_stop_token_of_the_config_ends_a_response():
    # two ids end a response; whatever stands after the first of them was never sampled.
    stops = tuple(range(4, 60))
    worker = build(engine="vllm", kv_cache_bytes=4 * 2**20, sampling=SamplingConfig(stop_token_ids=stops))
    _, shard = worker.sample(0, 0, 8, 1, 0)
    ids, mask = shard.get("input_ids").unbind(), shard.get("response_mask").unbind()
    for row, sampled in zip(ids, mask, strict=True):
        response = row[sampled].tolist()
        assert not set(response[:-1]) & {*stops, worker.tokenizer.eos_token_id}
    assert set(shard["finish_reasons"].tolist()) >= {0}
    assert row_lengths(shard.get("input_ids")).tolist() == [
        p + r for p, r in zip(shard["prompt_lengths"].tolist(), shard["response_lengths"].tolist(), strict=True)
    ]


class Sleeper(ScriptedEngine):
    """Notes what it is told, and refuses what a sleeping engine cannot do."""

    def __init__(self, rollout: RolloutConfig) -> None:
        super().__init__(rollout, vocab_size=SHAPE.vocab_size, encode=lambda text: [5] * len(text))
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake(self) -> None:
        self.told.append("wake")

    def generate(self, *args, **kwargs):
        assert self.told[-1:] != ["sleep"]
        self.told.append("generate")
        return super().generate(*args, **kwargs)

    def begin_update(self) -> None:
        assert self.told[-1:] != ["sleep"]
        self.told.append("weights")


def test_an_engine_that_is_offloaded_sleeps_after_each_rollout_and_wakes_for_work_and_for_weights():
    rollout = RolloutConfig(engine="scripted", scripted=SCRIPT, max_response_length=8, offload=True)
    worker = RolloutWorker(rollout, MODEL, DATA, 0, validation=VALIDATION, engine=Sleeper(rollout))
    worker.sample(0, 0, 2, 1, 0)
    worker.evaluate(2)
    worker.begin_weights()
    worker.sample(0, 2, 2, 1, 1)
    assert worker.engine.told == [
        "generate", "sleep", "wake", "generate", "sleep", "wake", "weights", "generate", "sleep",
    ]  # fmt: skip


def test_an_engine_that_is_not_offloaded_stays_where_it_is():
    rollout = RolloutConfig(engine="scripted", scripted=SCRIPT, max_response_length=8)
    worker = RolloutWorker(rollout, MODEL, DATA, 0, engine=Sleeper(rollout))
    worker.sample(0, 0, 2, 1, 0)
    assert worker.engine.told == ["generate"]


class Deaf(ScriptedEngine):
    """Takes no request that goes on behind an answer."""

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        if len(request.prompt_ids) <= DATA.max_prompt_length:
            super().add_request(request, sampling)


def test_an_episode_whose_second_turn_no_server_answers_takes_its_group_along():
    """Prompt 0 calls a tool and is not heard again; no token of its first turn is graded or trained."""
    script = ScriptedConfig(responses={"mode": "fixed", "texts": {"0": "[calculate(2*3)]", "*": "5"}})
    tools = ToolsConfig(functions=("resources.tools.calculator:calculate",), notation="inline")
    rollout = RolloutConfig(engine="scripted", scripted=script, max_response_length=40, tools=tools, group_size=2)
    source = SourceConfig(name="sort", kind="sorting", size=4)
    data = DATA.model_copy(update={"sources": [source], "prompts_per_iteration": 4})
    replica = ServesRequests()
    replica.engine = Deaf(rollout, vocab_size=104, encode=load_tokenizer(MODEL).encode)
    engine = ServedEngine(RolloutServers([LocalReplica("a", replica)], deadline_seconds=1.0))
    status, shard = RolloutWorker(rollout, MODEL, data, 0, engine=engine).sample(0, 0, 4, 2, 0)
    engine.shutdown()
    lost = torch.tensor([record["index"] == 0 for record in records_of(shard)])
    assert status["metrics"]["rollout/lost_rows"] == int(lost.sum()) == 2
    assert (shard["finish_reasons"] == FinishReason.ABORT).tolist() == lost.tolist()
    sampled = torch.tensor([int(mask.sum()) for mask in shard["response_mask"].unbind()])
    assert sampled.tolist() == [0 if own else 2 for own in lost.tolist()]
    assert (shard["token_versions"].values() >= 0).tolist() == shard["response_mask"].values().tolist()
    shard["scores"] = torch.zeros(8)
    estimate = partial(
        estimate_advantages, estimator="dr_grpo", gamma=1.0, gae_lambda=1.0, whiten_advantages=False, scale_by_std=False
    )
    metrics, trained = advantages_of_rows(shard, estimator=estimate)
    assert metrics["rollout/dropped_groups"] == 1.0
    assert row_lengths(trained["train_mask"]).tolist() == row_lengths(shard["response_mask"]).tolist()
    assert [int(mask.sum()) for mask in trained["train_mask"].unbind()] == sampled.tolist()


def test_lost_rows_of_several_rounds_add_up():
    engine: Any = SimpleNamespace(lost={0: "late"}, new_redispatches=lambda: 2)
    rounds = [_lost(engine, [None, None]), _lost(engine, [None, None, None])]
    assert finish_metrics(add_sums(rounds)) == {"rollout/lost_rows": 2.0, "rollout/redispatches": 4.0}
