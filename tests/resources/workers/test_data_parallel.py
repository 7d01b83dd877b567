"""One, two and three data-parallel ranks train the same model, and no rank waits for ever."""

import json

import pytest
import torch

from tests.resources.workers.ranked_processes import run_ranked
from tests.resources.workers.tiny import (
    PPO,
    TEMPERATURE,
    VALUE_LOSS,
    actor,
    critic,
    largest_gap,
    logged,
    make_rows,
    plans,
    scored,
    weights_of,
)


def train_actor(dp_size, fsdp, num_rows):
    """Scores and trains; every rank keeps its share of rows by itself, as the plans say."""
    worker = actor(fsdp=fsdp)
    rows = make_rows(num_rows)
    status, shard = worker.compute_log_probs(rows, TEMPERATURE)
    rows = scored(worker, rows)
    plan = plans(rows, dp_size=dp_size, num_mini_batches=2, num_ppo_epochs=2, first_ratio_tolerance=1e-5)[worker.rank]
    status = worker.update(rows, plan, PPO, TEMPERATURE, with_entropy=True)
    return shard["old_log_probs"].values(), status, weights_of(worker)


@pytest.fixture(scope="module")
def alone():
    return train_actor(1, True, 7)


@pytest.mark.parametrize(("dp_size", "fsdp"), [(2, True), (3, True), (2, False)])
def test_data_parallel_ranks_train_the_same_actor_as_one(alone, dp_size, fsdp):
    ranks = run_ranked(train_actor, dp_size, dp_size, fsdp, 7)
    expected = logged([alone[1]["metrics"]])
    metrics = logged([status["metrics"] for _, status, _ in ranks])
    for log_probs, _, weights in ranks:
        torch.testing.assert_close(log_probs, alone[0], atol=1e-5, rtol=1e-5)
        assert largest_gap(weights, alone[2]) < 2e-5
    assert metrics.pop("actor/padding_micro_batches", 0.0) >= 0.0
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def train_and_save(folder):
    """Two ranks with the whole model each; a fresh actor of theirs loads what they saved."""
    worker, rows = actor(fsdp=False), make_rows(6)
    worker.update(scored(worker, rows), plans(rows, dp_size=2)[worker.rank], PPO, TEMPERATURE)
    worker.save_checkpoint(folder)
    torch.distributed.barrier()
    again = actor(fsdp=False)
    again.load_checkpoint(folder)
    return weights_of(worker), largest_gap(weights_of(worker), weights_of(again))


def test_ranks_with_the_whole_model_each_save_it_once_and_one_process_loads_it(tmp_path):
    ranks = run_ranked(train_and_save, 2, str(tmp_path))
    boxes = [json.loads((tmp_path / "actor" / f"rank-0000{rank}.json").read_text())["boxes"] for rank in (0, 1)]
    assert set(boxes[1]) == {"rank.rng"}
    assert {"model.lm.model.norm.weight", "optimizer.exp_avg.lm.model.norm.weight"} <= set(boxes[0])
    again = actor()
    again.load_checkpoint(str(tmp_path))
    assert largest_gap(weights_of(again), ranks[0][0]) == 0.0
    assert [gap for _, gap in ranks] == [0.0, 0.0]


def train_critic(dp_size):
    worker = critic()
    rows = make_rows(7)
    values = worker.estimate_values(rows)[1]
    rows["values"] = values.get("values")
    status = worker.update(rows, plans(rows, dp_size=dp_size, num_mini_batches=2)[worker.rank], VALUE_LOSS)
    return values["values"].values(), status["metrics"], worker.estimate_values(rows)[1]["values"].values()


def test_two_ranks_train_the_same_critic_as_one():
    before, metrics, after = train_critic(1)
    ranks = run_ranked(train_critic, 2, 2)
    for rank in ranks:
        torch.testing.assert_close(rank[0], before, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank[2], after, atol=1e-4, rtol=1e-4)
    combined, expected = logged([rank[1] for rank in ranks]), logged([metrics])
    assert combined["critic/loss"] == pytest.approx(expected["critic/loss"], rel=1e-4)


def train_few_rows(num_rows):
    worker = actor()
    rows = scored(worker, make_rows(num_rows))
    plan = plans(rows, dp_size=2, micro_batch_size=1)[worker.rank]
    own = rows[:0] if not plan.row_ids else rows
    status = worker.update(own, plan, PPO, TEMPERATURE)
    return status["metrics"], [len(mini.micro_batches) for mini in plan.mini_batches]


def test_a_rank_without_rows_still_enters_every_collective():
    """Three rows of one each on two ranks need two passes on both; one row leaves a rank with nothing."""
    ranks = run_ranked(train_few_rows, 2, 1)
    assert [passes for _, passes in ranks] == [[1], [1]]
    metrics = logged([metrics for metrics, _ in ranks])
    assert metrics["actor/padding_micro_batches"] == 1.0
    assert metrics["actor/optimizer_steps"] == 1.0


def train_on_nan():
    worker = actor()
    rows = scored(worker, make_rows(4))
    before = weights_of(worker)
    plan = plans(rows, dp_size=2, micro_batch_size=2)[worker.rank]
    advantages = rows["advantages"].values()
    if worker.rank == 1:
        advantages.fill_(float("nan"))
    status = worker.update(rows, plan, PPO, TEMPERATURE)
    return status["metrics"], largest_gap(before, weights_of(worker)), worker.optimizer.skipped_steps


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    ranks = run_ranked(train_on_nan, 2)
    assert [gap for _, gap, _ in ranks] == [0.0, 0.0]
    assert [skipped for _, _, skipped in ranks] == [1, 1]
    metrics = logged([metrics for metrics, _, _ in ranks])
    assert metrics["actor/skipped_steps"] == 1.0
    assert "actor/grad_norm" not in metrics


def restore_after_scoring():
    worker, other = actor(), critic()
    rows = make_rows(6)
    found = []
    for one, score in (
        (worker, lambda: worker.compute_log_probs(rows, TEMPERATURE)),
        (other, lambda: other.estimate_values(rows)),
    ):
        kept = one.snapshot()[1]
        score()
        one.restore(kept)
        again = one.snapshot()[1]
        found.append(
            [name for name, piece in kept["tensors"].items() if not torch.equal(piece, again["tensors"][name])]
        )
    return found


def test_ranks_that_have_scored_take_their_own_pieces_back():
    """What a recovery in the middle of an iteration asks of them: not the gathered weights, but each rank's share."""
    assert run_ranked(restore_after_scoring, 2) == [[[], []], [[], []]]
