"""The actor in-process: what it scores, how it steps, when it refuses, and that its state comes back."""

import functools
import itertools
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from configs.model import ModelConfig, OptimizerConfig
from configs.training import TrainedRoleConfig
from resources.batch import join_columns, row_lengths, select_rows, validate
from resources.models.causal_lm import save_model_folder
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.log_probs import log_probs_from_logits
from resources.models.published_folder import published_folder
from resources.update_plan import RATIO_TOLERANCE
from resources.workers.actor import ActorWorker
from resources.workers.trained import RatioError
from tests.resources.workers.tiny import (
    MODEL,
    PPO,
    TEMPERATURE,
    actor,
    largest_gap,
    logged,
    make_rows,
    plans,
    rows_of,
    scored,
    weights_of,
)


def test_log_probs_are_those_of_the_plain_model():
    worker, rows = actor(), make_rows(6)
    shard = worker.compute_log_probs(rows, TEMPERATURE)[1]
    validate(join_columns([rows, shard]), ["old_log_probs", "entropy"])
    starts = rows["input_ids"].offsets().tolist()
    for start, stop in itertools.pairwise(starts):
        ids = rows["input_ids"].values()[start:stop]
        with torch.no_grad():
            logits = worker.module.lm(input_ids=ids[None]).logits[0, :-1]
        expected, entropy = log_probs_from_logits(logits, ids[1:], TEMPERATURE)
        mask = rows["response_mask"].values()[start:stop]
        for column, values in (("old_log_probs", expected), ("entropy", entropy)):
            got = shard[column].values()[start:stop]
            torch.testing.assert_close(got[1:][mask[1:]], values[mask[1:]], atol=1e-5, rtol=1e-5)
            assert float(got[~mask].abs().sum()) == 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_ratio_before_the_first_step_is_one_at_every_temperature(temperature):
    worker, rows = actor(), make_rows(5)
    rows = join_columns([rows, worker.compute_log_probs(rows, temperature)[1].exclude("entropy")])
    plan = plans(rows, micro_batch_size=2, first_ratio_tolerance=RATIO_TOLERANCE["float32"])[0]
    metrics = worker.update(rows, plan, PPO, temperature)["metrics"]
    assert metrics["actor/log_ratio/max"] <= 1e-5
    assert metrics["actor/clip_fraction"] == 0.0


@pytest.mark.parametrize("spoil", ["temperature", "shift", "weights"])
def test_log_probs_of_another_distribution_are_refused_before_anything_is_trained(spoil):
    worker, rows = actor(), make_rows(5)
    rows = scored(worker, rows)
    if spoil == "shift":
        rows["old_log_probs"].values().copy_(rows["old_log_probs"].values().roll(1))
    if spoil == "weights":
        with torch.no_grad():
            worker.module.lm.model.norm.weight.mul_(1.01)
    before = weights_of(worker)
    plan = plans(rows, first_ratio_tolerance=RATIO_TOLERANCE["float32"])[0]
    with pytest.raises(RatioError, match="the most that rounding explains"):
        worker.update(rows, plan, PPO, 1.0 if spoil == "temperature" else TEMPERATURE)
    assert largest_gap(before, weights_of(worker)) == 0.0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_one_micro_batch_and_many_give_the_same_step(aggregation):
    loss = functools.partial(PPO, aggregation=aggregation)
    results = []
    for size in (7, 2, 1):
        worker = actor(optimizer=OptimizerConfig(lr=1e-3))
        rows = scored(worker, make_rows(7))
        metrics = worker.update(rows, plans(rows, micro_batch_size=size)[0], loss, TEMPERATURE)["metrics"]
        results.append((logged([metrics]), weights_of(worker)))
    for metrics, weights in results[1:]:
        assert largest_gap(weights, results[0][1]) < 1e-5  # a hundredth of a step of Adam, which scales rounding up
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)


def test_a_token_budget_gives_the_same_step_as_a_row_count():
    def after(**settings):
        worker = actor(optimizer=OptimizerConfig(lr=1e-3), **settings)
        rows = scored(worker, make_rows(7))
        status = worker.update(
            rows, plans(rows, micro_batch_tokens=settings.get("micro_batch_tokens"))[0], PPO, TEMPERATURE
        )
        return weights_of(worker), status["spans"]

    by_rows, _ = after()
    by_tokens, spans = after(micro_batch_tokens=24)
    assert largest_gap(by_rows, by_tokens) < 2e-6
    assert 0.5 < spans["micro_batch_fill"] <= 1.0


def test_recomputed_activations_give_the_same_step():
    weights = []
    for checkpointing in (False, True):
        worker = actor(MODEL.model_copy(update={"gradient_checkpointing": checkpointing}))
        rows = scored(worker, make_rows(4))
        worker.update(rows, plans(rows)[0], PPO, TEMPERATURE)
        weights.append(weights_of(worker))
    assert largest_gap(*weights) == 0.0


def test_bfloat16_arithmetic_keeps_float32_masters():
    worker = actor(MODEL.model_copy(update={"dtype": "bfloat16"}))
    rows = scored(worker, make_rows(4))
    exact = actor().compute_log_probs(rows, TEMPERATURE)[1]["old_log_probs"].values()
    gap = (rows["old_log_probs"].values() - exact).abs()
    assert 0.0 < float(gap.max()) < 0.05
    plan = plans(rows, first_ratio_tolerance=RATIO_TOLERANCE["bfloat16"])[0]
    worker.update(rows, plan, PPO, TEMPERATURE)
    assert {parameter.dtype for parameter in worker.module.parameters()} == {torch.float32}
    assert {tensor.dtype for bucket in worker.export_weights() for _, tensor in bucket} == {torch.bfloat16}


def test_an_update_that_fails_in_a_pass_leaves_the_masters_in_place():
    worker = actor(MODEL.model_copy(update={"dtype": "bfloat16"}))
    rows, before = make_rows(4), list(worker.module.parameters())
    rows = scored(worker, rows)

    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("a loss of somebody's own")

    with pytest.raises(ArithmeticError):
        worker.update(rows, plans(rows)[0], broken, TEMPERATURE)
    assert all(now is then for now, then in zip(worker.module.parameters(), before, strict=True))


def test_rows_without_a_trained_token_change_nothing_and_are_counted():
    """The same update with and without two rows that are masked whole."""
    worker, rows = actor(), make_rows(6)
    mask = rows["response_mask"].values().clone()
    starts = rows["response_mask"].offsets()
    mask[: int(starts[2])] = False
    rows["train_mask"] = torch.nested.nested_tensor_from_jagged(mask, starts)
    rows = scored(worker, rows)
    plan = plans(rows)[0]
    assert plan.num_masked_rows == 2
    metrics = logged([worker.update(rows, plan, PPO, TEMPERATURE)["metrics"]])
    assert metrics["actor/masked_rows"] == 2.0

    other = actor()
    few = scored(other, make_rows(6))[2:]
    plan = plans(few)[0]
    other.update(few, plan, PPO, TEMPERATURE)
    assert largest_gap(weights_of(worker), weights_of(other)) < 2e-6


def test_a_response_of_no_tokens_has_no_log_probs_and_takes_no_part():
    rows = rows_of([[5, 6, 7, 8], [5, 6]], [[0, 0, 1, 1], [0, 0]])
    worker = actor()
    rows = scored(worker, rows)
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(torch.ones(6), rows["input_ids"].offsets())
    assert rows["old_log_probs"].values()[4:].tolist() == [0.0, 0.0]
    plan = plans(rows)[0]
    assert plan.row_ids == (0,)
    assert worker.update(rows, plan, PPO, TEMPERATURE)["metrics"]["actor/optimizer_steps"] == 1.0


def test_a_batch_of_no_rows_is_scored_to_no_rows():
    shard = actor().compute_log_probs(make_rows(3)[:0])[1]
    assert shard.batch_size[0] == 0
    assert row_lengths(shard["old_log_probs"]).tolist() == []


def test_the_epochs_stop_before_the_step_that_would_go_past_the_target():
    worker = actor(optimizer=OptimizerConfig(lr=5e-2))
    rows = scored(worker, make_rows(7))
    plan = plans(rows, num_ppo_epochs=5, target_kl=1e-3)[0]
    metrics = worker.update(rows, plan, PPO, TEMPERATURE)["metrics"]
    assert metrics["actor/early_stops"] == 1.0
    assert 1.0 <= metrics["actor/optimizer_steps"] < 5.0


def test_the_work_of_an_update_that_stops_early_is_that_of_the_mini_batches_it_ran():
    worker = actor(optimizer=OptimizerConfig(lr=5e-2))
    rows = scored(worker, rows_of([[5, 6, 7, 8], [5, 9, 10]], [[0, 1, 1, 1], [0, 1, 1]]))
    rows["advantages"] = torch.nested.nested_tensor_from_jagged(torch.ones(7), rows["input_ids"].offsets())
    plan = plans(rows, num_ppo_epochs=5, target_kl=1e-6)[0]
    spans = worker.update(rows, plan, PPO, TEMPERATURE)["spans"]
    # The first epoch moves the policy past any target: the second runs its passes and takes no step.
    assert (spans["tokens"], spans["rows"], spans["micro_batches"], spans["optimizer_steps"]) == (14, 4, 2, 1)
    whole = worker.update(rows, plans(rows, num_ppo_epochs=1)[0], PPO, TEMPERATURE)["spans"]
    assert spans["model_flops"] == 2 * whole["model_flops"]
    assert whole["optimizer_steps"] == 1, "of this call, not of the worker's life"


def test_nan_advantages_leave_weights_and_moments_alone():
    worker = actor()
    rows = scored(worker, make_rows(4))
    rows["advantages"].values().fill_(float("nan"))
    before = weights_of(worker)
    metrics = logged([worker.update(rows, plans(rows)[0], PPO, TEMPERATURE)["metrics"]])
    assert largest_gap(before, weights_of(worker)) == 0.0
    assert metrics["actor/skipped_steps"] == 1.0
    assert "actor/grad_norm" not in metrics
    assert all(bool(tensor.isfinite().all()) for tensor in worker.optimizer.tensors().values())


@pytest.mark.parametrize("way", ["state", "snapshot", "checkpoint"])
def test_a_restored_actor_goes_on_to_the_same_bits(way, tmp_path):
    """Two updates in one go, and the second again from what was kept after the first."""
    worker, rows = actor(), make_rows(6)
    worker.update(scored(worker, rows), plans(rows, iteration=0)[0], PPO, TEMPERATURE)
    if way == "checkpoint":
        worker.save_checkpoint(str(tmp_path))
    kept = worker.snapshot()[1]
    random_after = torch.rand(2)
    worker.update(scored(worker, rows), plans(rows, iteration=1)[0], PPO, TEMPERATURE)

    again = actor()
    if way == "state":
        again.load_state(kept)
    elif way == "snapshot":
        again.restore(kept)
    else:
        again.load_checkpoint(str(tmp_path))
    assert torch.equal(torch.rand(2), random_after)
    assert again.optimizer.steps == 1
    again.update(scored(again, rows), plans(rows, iteration=1)[0], PPO, TEMPERATURE)
    assert largest_gap(weights_of(worker), weights_of(again)) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_actor_that_has_scored_keeps_and_takes_back_the_masters(dtype):
    """A recovery in the middle of an iteration finds workers that have scored and not been updated."""
    model = MODEL.model_copy(update={"dtype": dtype})
    worker, rows = actor(model), make_rows(6)
    worker.update(scored(worker, rows), plans(rows, first_ratio_tolerance=RATIO_TOLERANCE[dtype])[0], PPO, TEMPERATURE)
    before = worker.snapshot()[1]["tensors"]
    worker.compute_log_probs(rows, TEMPERATURE)
    after = worker.snapshot()[1]
    assert all(torch.equal(before[name], after["tensors"][name]) for name in before)

    other = actor(model)
    other.compute_log_probs(rows, TEMPERATURE)
    other.restore(after)
    for one in (worker, other):
        plan = plans(rows, iteration=1, first_ratio_tolerance=RATIO_TOLERANCE[dtype])[0]
        one.update(scored(one, rows), plan, PPO, TEMPERATURE)
    assert largest_gap(weights_of(worker), weights_of(other)) == 0.0


def test_a_state_that_lacks_a_tensor_is_refused_by_name():
    worker = actor()
    state = worker.snapshot()[1]
    del state["tensors"]["optimizer.exp_avg.lm.model.norm.weight"]
    with pytest.raises(ValueError, match=r"optimizer\.exp_avg\.lm\.model\.norm\.weight"):
        worker.load_state(state)


def test_weights_offloaded_and_brought_back_train_on():
    worker = actor()
    rows = scored(worker, make_rows(4))
    before = weights_of(worker)
    worker.offload()
    worker.onload()
    assert largest_gap(before, weights_of(worker)) == 0.0
    assert worker.update(rows, plans(rows)[0], PPO, TEMPERATURE)["metrics"]["actor/optimizer_steps"] == 1.0


def test_an_actor_that_is_offloaded_between_its_calls_trains_as_one_that_stays():
    settings = TrainedRoleConfig(micro_batch_size=2, offload=True)
    away, rows = ActorWorker(MODEL, settings, 0), make_rows(4)
    stays = ActorWorker(MODEL, settings.model_copy(update={"offload": False}), 0)
    for worker in (away, stays):
        own = scored(worker, rows)
        assert worker.is_offloaded == (worker is away)
        worker.update(own, plans(own)[0], PPO, TEMPERATURE)
        assert worker.is_offloaded == (worker is away)
    assert largest_gap(weights_of(away), weights_of(stays)) == 0.0


def test_tied_embeddings_are_sent_under_both_names_with_one_memory():
    worker = actor()
    sent = dict(pair for bucket in worker.export_weights(bucket_bytes=4096) for pair in bucket)
    assert sorted(sent) == sorted(worker.expected_names())
    assert sent["lm_head.weight"] is sent["model.embed_tokens.weight"]


def test_buckets_hold_at_most_what_was_asked_unless_one_tensor_is_larger():
    buckets = list(actor().export_weights(bucket_bytes=5000))
    for bucket in buckets:
        own = {id(tensor): tensor.nbytes for _, tensor in bucket}
        assert sum(own.values()) <= 5000 or len(own) == 1


def test_float32_weights_arrive_as_their_bfloat16_rounding():
    worker = actor()
    with torch.no_grad():
        worker.module.lm.model.norm.weight[:3] = torch.tensor([1.001, 3.14159, 65504.0])
    sent = dict(pair for bucket in worker.export_weights(wire_dtype="bfloat16") for pair in bucket)
    assert sent["model.norm.weight"][:3].tolist() == [1.0, 3.140625, 65536.0]


def test_the_exported_folder_is_the_policy(tmp_path):
    worker, rows = actor(), make_rows(4)
    worker.update(scored(worker, rows), plans(rows)[0], PPO, TEMPERATURE)
    worker.export(str(tmp_path / "policy"))
    again = actor(ModelConfig(path=str(tmp_path / "policy")))
    assert largest_gap(weights_of(worker), weights_of(again)) == 0.0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(plain.lm_head.weight, worker.module.lm.lm_head.weight)


def test_an_export_ends_on_every_token_that_its_model_ends_on(tmp_path):
    """The second of them stands in generation_config.json alone, beside defaults that transformers would not write."""
    actor().export(str(tmp_path / "base"))
    told = {"eos_token_id": [2, 7], "do_sample": False, "temperature": 0.6}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(told))
    actor(ModelConfig(path=str(tmp_path / "base"))).export(str(tmp_path / "policy"))
    kept = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert {name: kept.get(name) for name in ("eos_token_id", "temperature")} == {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
    }


def test_an_export_says_of_dropout_what_its_model_said_though_it_was_trained_without(tmp_path):
    told = {"residual_dropout": 0.5, "attention_dropout": 0.25, "embedding_dropout": 0.0}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Starcoder2Config(vocab_size=128, bos_token_id=1, eos_token_id=2, **shape, **told)
    save_model_folder(Starcoder2ForCausalLM(config), build_character_tokenizer(), tmp_path / "base")
    worker = actor(ModelConfig(path=str(tmp_path / "base")))
    assert worker.module.lm.config.residual_dropout == 0.0
    worker.export(str(tmp_path / "policy"))
    kept = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert {name: kept[name] for name in told} == told


def test_the_weights_of_an_export_are_as_readable_as_its_config(tmp_path):
    actor().export(str(tmp_path / "policy"))
    modes = {name: (tmp_path / "policy" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert modes["model.safetensors"] == modes["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_an_export_that_fails_leaves_the_folder_of_before_and_nothing_beside_it(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine").touch()
    with pytest.raises(FileNotFoundError), published_folder(tmp_path / "policy") as staging:
        shutil.copy(tmp_path / "no such file", staging)
    assert [path.name for path in tmp_path.rglob("*")] == ["policy", "mine"]


def test_checksums_change_with_the_weights_and_only_with_them():
    worker = actor()
    first = worker.checksum()
    assert first == actor().checksum()
    with torch.no_grad():
        worker.module.lm.model.norm.weight[0] += 1e-3
    changed = {name for name, value in worker.checksum().items() if value != first[name]}
    assert changed == {"model.norm.weight"}


def test_the_status_says_what_was_worked_on():
    worker, rows = actor(), make_rows(5)
    spans = worker.compute_log_probs(rows)[0]["spans"]
    assert spans["tokens"] == int(rows["input_ids"].values().numel())
    assert spans["rows"] == 5
    assert spans["micro_batches"] == 2
    assert spans["model_flops"] > 2 * worker.num_parameters * spans["tokens"]
    assert spans["forward_seconds"] > 0.0
    assert spans["end"] >= spans["start"]


def test_threads_are_set_even_where_a_library_has_disabled_the_setter(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    torch._C.set_num_threads(2)
    actor()
    assert torch.get_num_threads() == 1


def test_rows_in_another_order_get_the_same_log_probs_by_row_id():
    """The permutation [2, 0, 1]: what belongs to a row follows its id."""
    worker, rows = actor(), make_rows(3)
    plain = worker.compute_log_probs(rows)[1]
    permuted = worker.compute_log_probs(select_rows(rows, [102, 100, 101]))[1]
    assert permuted["row_ids"].tolist() == [102, 100, 101]
    back = select_rows(permuted, [100, 101, 102])
    assert torch.equal(back["old_log_probs"].values(), plain["old_log_probs"].values())
