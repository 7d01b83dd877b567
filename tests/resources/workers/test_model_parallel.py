"""Tensor- and sequence-parallel ranks compute what one rank computes."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.model import ModelConfig, OptimizerConfig
from configs.training import CriticConfig
from resources.memory import held_parameters
from resources.models.causal_lm import save_model_folder
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.sharding import local_part
from resources.workers.critic import CriticWorker
from tests.resources.workers.ranked_processes import run_ranked
from tests.resources.workers.tiny import (
    MODEL,
    PPO,
    SHAPE,
    TEMPERATURE,
    actor,
    largest_gap,
    make_rows,
    plans,
    scored,
    weights_of,
)

UNTIED = ModelConfig(build="tiny", shape=SHAPE.model_copy(update={"tied_embeddings": False}))
SMALL_STEPS = OptimizerConfig(lr=1e-3)
"""Adam turns rounding of tiny gradients into whole steps, so the rate bounds how far two roundings may part."""


def train(options, model=MODEL, micro_batches=3, folder=None):
    worker = actor(model, optimizer=SMALL_STEPS, **options)
    rows = make_rows(5)
    _, shard = worker.compute_log_probs(rows, TEMPERATURE)
    rows = scored(worker, rows)
    dp_size, model_size = worker.layout.dp_size, worker.world_size // worker.layout.dp_size
    plan = plans(rows, dp_size=dp_size, num_ppo_epochs=2, micro_batch_size=micro_batches, first_ratio_tolerance=2e-5)[
        worker.rank // model_size
    ]
    status = worker.update(rows, plan, PPO, TEMPERATURE, with_entropy=True)
    if folder is not None:
        worker.save_checkpoint(folder)
    return shard["old_log_probs"].values(), shard["entropy"].values(), status["metrics"], weights_of(worker)


def assert_same(ranks, alone):
    for log_probs, entropy, metrics, weights in ranks:
        torch.testing.assert_close(log_probs, alone[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, alone[1], atol=1e-5, rtol=1e-5)
        if metrics.get("actor/grad_norm/count"):
            assert metrics["actor/grad_norm"] == pytest.approx(alone[2]["actor/grad_norm"], rel=1e-4)
        assert largest_gap(weights, alone[3]) < 2e-5


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
def test_two_tensor_parallel_ranks_equal_one(model):
    assert_same(run_ranked(train, 2, {"tensor_parallel": 2}, model), train({}, model))


def hold(model):
    """Numbers in the weights that this rank holds of an actor and of a critic."""
    options = {"tensor_parallel": 2}
    workers = [actor(model, **options), CriticWorker(model, CriticConfig(), 0, threads=1, **options)]
    return [sum(local_part(part).numel() for part in worker.module.parameters()) for worker in workers]


@pytest.mark.parametrize(("model", "held"), [(MODEL, [10_976, 11_008]), (UNTIED, [14_176, 12_608])], ids=["tied", ""])
def test_each_of_two_tensor_parallel_ranks_holds_what_the_plan_counts(model, held):
    # Matrices of a layer: q and o 2x32x32, k and v 2x32x16, MLP 3x32x64 = 9216.
    # Embedding 100x32 = 3200, norms 5x32 = 160.
    # Tied: (3200 + 2x9216) / 2 + 160, and 32 for the critic's head.
    # Untied: the embedding stays whole, 3200 + (3200 + 2x9216) / 2 + 160.
    # The critic has no head of 3200, and one of 32.
    assert run_ranked(hold, 2, model) == [held] * 2
    assert [held_parameters(model.shape, 2, has_value_head) for has_value_head in (False, True)] == held


def operations(options):
    worker = actor(MODEL, **options)
    status, _ = worker.compute_log_probs(make_rows(5), TEMPERATURE)
    return status["spans"]["model_flops"]


def test_the_operations_of_two_tensor_parallel_ranks_add_up_to_those_of_one():
    assert run_ranked(operations, 2, {"tensor_parallel": 2}) == [operations({}) / 2] * 2


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_two_sequence_parallel_ranks_equal_one(kv_heads):
    """With one key/value head there is none to deal out to the second rank."""
    model = ModelConfig(build="tiny", shape=SHAPE.model_copy(update={"num_kv_heads": kv_heads}))
    assert_same(run_ranked(train, 2, {"sequence_parallel": 2}, model), train({}, model))


def test_norms_of_single_heads_get_their_whole_gradient_under_tensor_parallelism(tmp_path):
    """Qwen3 normalises each head; a rank sees half of them. Two micro-batches: a sum per backward would count twice."""
    config = Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    save_model_folder(Qwen3ForCausalLM(config), build_character_tokenizer(), tmp_path)
    model = ModelConfig(path=str(tmp_path))
    assert_same(run_ranked(train, 2, {"tensor_parallel": 2}, model), train({}, model))


@pytest.mark.slow
def test_tensor_data_and_sequence_parallel_ranks_together_equal_one(tmp_path):
    alone = train({})
    four = run_ranked(train, 4, {"tensor_parallel": 2}, MODEL, 3, str(tmp_path))
    assert_same(four, alone)
    again = actor(optimizer=SMALL_STEPS)
    again.load_checkpoint(str(tmp_path))
    assert largest_gap(weights_of(again), four[0][3]) == 0.0
    assert_same(run_ranked(train, 4, {"sequence_parallel": 2}), alone)


def test_a_rank_count_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(AssertionError, match="sequence_parallel is 3 and the model has 4 heads"):
        run_ranked(train, 3, {"sequence_parallel": 3})
