"""Reference, reward model and compute worker."""

import math

import pytest
import torch

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.batch import make_shard, ragged_from_values
from resources.engines.base import WeightMismatchError
from resources.models.causal_lm import ModelError
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.reward_export import export_reward_model
from resources.models.value_head import build_value_model
from resources.weight_sender import probe_tokens
from resources.workers.compute import ComputeWorker
from resources.workers.reference import ReferenceWorker
from resources.workers.reward_model import RewardModelWorker
from tests.resources.workers.ranked_processes import run_ranked
from tests.resources.workers.tiny import MODEL, PPO, SHAPE, TEMPERATURE, actor, make_rows, plans, rows_of, scored

SETTINGS = TrainedRoleConfig(micro_batch_size=2)


def ref_log_probs(worker, rows):
    return worker.score(rows, TEMPERATURE)[1]["ref_log_probs"].values()


def test_the_reference_starts_as_the_actor_and_stays_while_it_learns():
    reference, policy, rows = ReferenceWorker(MODEL, SETTINGS, 0), actor(), make_rows(4)
    rows = scored(policy, rows)
    before = ref_log_probs(reference, rows)
    torch.testing.assert_close(before, rows["old_log_probs"].values(), atol=1e-6, rtol=1e-6)
    policy.update(rows, plans(rows)[0], PPO, TEMPERATURE)
    assert torch.equal(ref_log_probs(reference, rows), before)


def test_in_bfloat16_the_reference_scores_far_positions_as_the_actor_that_it_is():
    """Rotary frequencies rounded to bfloat16 put position 600 elsewhere: 0.003 apart here, more in a deeper model."""
    shape = SHAPE.model_copy(update={"max_positions": 1024})
    model = MODEL.model_copy(update={"dtype": "bfloat16", "shape": shape})
    tokens = torch.randint(4, 100, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = scored(actor(model), rows_of([tokens], [[0] + [1] * 599]))
    assert torch.equal(ref_log_probs(ReferenceWorker(model, SETTINGS, 0), rows), rows["old_log_probs"].values())


def test_a_refreshed_reference_is_the_actor_of_now():
    reference, policy, rows = ReferenceWorker(MODEL, SETTINGS, 0), actor(), make_rows(4)
    rows = scored(policy, rows)
    policy.update(rows, plans(rows)[0], PPO, TEMPERATURE)
    reference.siblings = {"actor": policy}
    report = reference.receive_from_sibling(1, 2**20, "float32", probe_tokens(60))
    assert report["probe"] == pytest.approx(report["actor_probe"], abs=1e-5)
    now = scored(policy, rows.exclude("old_log_probs"))["old_log_probs"].values()
    torch.testing.assert_close(ref_log_probs(reference, rows), now, atol=1e-6, rtol=1e-6)


def test_a_refresh_with_a_renamed_tensor_is_refused():
    named = [pair for bucket in actor().export_weights() for pair in bucket]
    renamed = [("other" + name, tensor) if "q_proj" in name else (name, tensor) for name, tensor in named]
    engine = ReferenceWorker(MODEL, SETTINGS, 0).engine
    engine.begin_update()
    engine.load_weights(renamed)
    with pytest.raises(WeightMismatchError, match=r"were not expected: .'othermodel"):
        engine.finish_update(1, actor().expected_names())


def test_a_refreshed_reference_comes_back_from_a_snapshot_and_from_a_checkpoint(tmp_path):
    reference, policy, rows = ReferenceWorker(MODEL, SETTINGS, 0), actor(), make_rows(4)
    policy.update(scored(policy, rows), plans(rows)[0], PPO, TEMPERATURE)
    reference.siblings = {"actor": policy}
    reference.receive_from_sibling(1, 2**20, "float32", probe_tokens(60))
    wanted = ref_log_probs(reference, rows)
    reference.save_checkpoint(str(tmp_path))
    for way in ("snapshot", "checkpoint"):
        fresh = ReferenceWorker(MODEL, SETTINGS, 0)
        assert not torch.equal(ref_log_probs(fresh, rows), wanted)
        fresh.restore(reference.snapshot()[1]) if way == "snapshot" else fresh.load_checkpoint(str(tmp_path))
        assert torch.equal(ref_log_probs(fresh, rows), wanted), way


def score_on_ranks():
    return ref_log_probs(ReferenceWorker(MODEL, SETTINGS, 0), make_rows(5))


def test_a_sharded_reference_scores_as_a_whole_one():
    alone = score_on_ranks()
    for log_probs in run_ranked(score_on_ranks, 2):
        torch.testing.assert_close(log_probs, alone, atol=1e-5, rtol=1e-5)


@pytest.fixture
def reward_folder(tmp_path):
    scalar = build_value_model(MODEL, seed=1)
    folder = tmp_path / "reward"
    export_reward_model(folder, scalar.model.config, build_character_tokenizer(), scalar.state_dict())
    return folder, scalar


def test_a_score_is_read_at_the_last_token_whatever_the_padding(reward_folder):
    folder, scalar = reward_folder
    worker = RewardModelWorker(ModelConfig(path=str(folder)), SETTINGS, 0)
    rows = rows_of([[5, 6, 7], [5, 6, 7, 8, 9, 10], [4, 5]], [[0, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0]])
    scores = worker.score(rows)[1]["scores"]
    for index, ids in enumerate([[5, 6, 7], [5, 6, 7, 8, 9, 10]]):
        assert float(scores[index]) == pytest.approx(float(scalar.read(torch.tensor([ids]))[0, -1].detach()), abs=1e-5)
    assert math.isnan(float(scores[2])), "a row without a response cannot be scored, and 0 would be a score"


def test_a_reward_model_in_the_home_of_the_user_is_found(reward_folder, monkeypatch):
    folder, _ = reward_folder
    monkeypatch.setenv("HOME", str(folder.parent))
    worker = RewardModelWorker(ModelConfig(path=f"~/{folder.name}"), SETTINGS, 0)
    assert float(worker.score(rows_of([[5, 6, 7]], [[0, 1, 1]]))[1]["scores"][0]) != 0.0


def test_a_policy_is_refused_as_a_reward_model(tmp_path):
    actor().export(str(tmp_path / "policy"))
    with pytest.raises(ModelError, match="ForSequenceClassification with one label"):
        RewardModelWorker(ModelConfig(path=str(tmp_path / "policy")), SETTINGS, 0)


def test_a_compute_worker_applies_what_it_is_given():
    def double(rows, *, factor):
        values = ragged_from_values(rows["advantages"].values() * factor, rows["advantages"].offsets().diff())
        return {"x": 1.0}, make_shard({"row_ids": rows["row_ids"], "returns": values})

    rows = make_rows(3).exclude("returns")
    status, shard = ComputeWorker(threads=1).apply(double, rows, factor=2.0)
    assert status["metrics"] == {"x": 1.0}
    assert torch.equal(shard["returns"].values(), 2.0 * rows["advantages"].values())
