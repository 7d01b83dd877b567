"""The critic: values of the state before a token, learnt from returns."""

import functools

import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForSequenceClassification

from configs.model import LoraConfig, ModelConfig
from configs.training import CriticConfig
from resources.batch import join_columns, validate
from resources.models.causal_lm import save_model_folder
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.reward_export import export_reward_model
from resources.models.value_head import build_value_model
from resources.workers.critic import CriticWorker
from tasks.algorithms.objectives import critic_objective
from tests.resources.workers.tiny import MODEL, SHAPE, VALUE_LOSS, critic, logged, make_rows, plans, rows_of


def test_a_value_is_read_before_its_token_and_cannot_see_it():
    """Rows that differ in the last token only have equal values everywhere: the last value has not seen it."""
    rows = rows_of([[5, 6, 7, 8], [5, 6, 7, 99]], [[0, 1, 1, 1], [0, 1, 1, 1]])
    values = critic().estimate_values(rows)[1]["values"].values().reshape(2, 4)
    assert torch.equal(values[0], values[1])


def test_values_cover_tool_output_and_leave_the_prompt_at_zero():
    rows = rows_of([[5, 6, 7, 8, 9]], [[0, 0, 1, 0, 1]])
    values = critic().estimate_values(rows)[1]["values"].values()
    assert values[:2].tolist() == [0.0, 0.0]
    assert bool((values[2:] != 0.0).all())


def test_values_start_near_zero_and_are_a_function_of_the_seed():
    rows = make_rows(8)
    values, again = (critic().estimate_values(rows)[1]["values"].values() for _ in range(2))
    assert torch.equal(values, again)
    assert float(values.abs().mean()) < 0.5


def test_the_critic_learns_its_returns():
    worker, rows = critic(), make_rows(7)
    rows = join_columns([rows, worker.estimate_values(rows)[1]])
    validate(rows, ["values", "returns"])
    unclipped = functools.partial(critic_objective, value_clip=None)
    losses = []
    for iteration in range(8):
        status = worker.update(rows, plans(rows, iteration=iteration)[0], unclipped)
        losses.append(logged([status["metrics"]])["critic/loss"])
    assert losses[-1] < 0.6 * losses[0]


def test_a_critic_beside_an_actor_with_adapters_is_trained_whole():
    model = ModelConfig(build="tiny", shape=SHAPE, lora=LoraConfig(rank=2))
    worker = critic(model)
    assert all(parameter.requires_grad for parameter in worker.module.parameters())


def test_adapters_of_the_critics_own_model_are_trained_beside_its_head_and_nothing_else():
    adapted = MODEL.model_copy(update={"lora": LoraConfig(rank=2)})
    worker = CriticWorker(MODEL, CriticConfig(model=adapted), 0, threads=1)
    before = {name: tensor.detach().clone() for name, tensor in worker.module.named_parameters()}
    rows = make_rows(7)
    rows = join_columns([rows, worker.estimate_values(rows)[1]])
    worker.update(rows, plans(rows)[0], VALUE_LOSS)
    moved = {name for name, tensor in worker.module.named_parameters() if not torch.equal(tensor, before[name])}
    assert "score.weight" in moved
    assert all(".lora_B." in name for name in moved - {"score.weight"})  # A moves once B is no longer 0
    assert len(moved) == 1 + 2 * 7  # two layers of seven matrices each


def test_a_critic_can_start_from_a_reward_model(tmp_path):
    scalar = build_value_model(MODEL, seed=3)
    with torch.no_grad():
        scalar.score.weight.fill_(0.5)
    export_reward_model(tmp_path / "reward", scalar.model.config, build_character_tokenizer(), scalar.state_dict())
    worker = CriticWorker(
        MODEL, CriticConfig(model=ModelConfig(path=str(tmp_path / "reward")), from_reward_model=True), 0, threads=1
    )
    assert torch.equal(worker.module.score.weight, scalar.score.weight)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(worker.module.read(ids), scalar.read(ids))


def test_a_critic_from_a_reward_model_trains_without_dropout_and_on_every_token(tmp_path):
    scalar = build_value_model(MODEL, seed=3)
    config = scalar.model.config
    config.attention_dropout, config.pad_token_id = 0.9, 7
    export_reward_model(tmp_path / "reward", config, build_character_tokenizer(), scalar.state_dict())
    start = CriticConfig(model=ModelConfig(path=str(tmp_path / "reward")), from_reward_model=True)
    module = CriticWorker(MODEL, start, 0, threads=1).module.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    values = module.read(ids)
    assert torch.equal(values, module.read(ids))
    values.sum().backward()
    assert float(module.model.get_input_embeddings().weight.grad[7].abs().sum()) > 0.0


def test_a_critic_from_a_reward_model_of_another_architecture_trains_without_the_dropout_of_its_name(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Starcoder2Config(vocab_size=128, **shape, residual_dropout=0.5, num_labels=1, pad_token_id=0)  # pyright: ignore[reportCallIssue]
    save_model_folder(Starcoder2ForSequenceClassification(config), build_character_tokenizer(), tmp_path)
    start = CriticConfig(model=ModelConfig(path=str(tmp_path)), from_reward_model=True)
    module = CriticWorker(MODEL, start, 0, threads=1).module.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(module.read(ids), module.read(ids))


def test_a_restored_critic_estimates_the_same_values():
    worker, rows = critic(), make_rows(4)
    rows = join_columns([rows, worker.estimate_values(rows)[1]])
    kept = worker.snapshot()[1]
    before = rows["values"].values()
    worker.update(rows, plans(rows)[0], VALUE_LOSS)
    assert not torch.equal(worker.estimate_values(rows)[1]["values"].values(), before)
    worker.restore(kept)
    assert torch.equal(worker.estimate_values(rows)[1]["values"].values(), before)


def test_a_snapshot_of_another_shape_is_refused():
    worker = critic()
    kept = worker.snapshot()[1]
    kept["tensors"]["model.score.weight"] = torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"model\.score\.weight"):
        worker.restore(kept)


def test_the_value_behind_a_row_is_read_at_its_last_token_whatever_the_padding():
    """The last token is seen: rows that differ in it alone differ, and a longer neighbour changes nothing."""
    worker = critic()
    rows = rows_of([[5, 6, 7, 8], [5, 6, 7, 99], [5, 6, 7, 8, 9, 10]], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    behind = worker.estimate_values(rows, True)[1]["bootstrap_values"]
    alone = [float(worker.module.read(torch.tensor([ids]))[0, -1].detach()) for ids in ([5, 6, 7, 8], [5, 6, 7, 99])]
    assert behind[:2].tolist() == pytest.approx(alone, abs=1e-5)
    assert behind[0] != behind[1]
