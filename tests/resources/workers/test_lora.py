"""Adapters: trained alone, switched off for the reference, merged for export without touching what is trained."""

import pytest
import torch
from torch import nn

from configs.model import LoraConfig, ModelConfig
from resources.models.causal_lm import build_causal_lm
from resources.models.lora import adapter_layers, add_adapters, merged_names, merged_tensors
from resources.models.policy import PolicyModel
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

LORA = ModelConfig(build="tiny", shape=SHAPE, lora=LoraConfig(rank=2, alpha=4.0))


def train(dp_size):
    worker = actor(LORA)
    rows = scored(worker, make_rows(5))
    frozen = {
        name: p.detach().clone() for name, p in worker.module.named_parameters() if not p.requires_grad and dp_size == 1
    }
    reference = worker.score_reference(rows, TEMPERATURE)[1]["ref_log_probs"].values()
    worker.update(rows, plans(rows, dp_size=dp_size, num_ppo_epochs=2)[worker.rank], PPO, TEMPERATURE)
    after = worker.score_reference(rows, TEMPERATURE)[1]["ref_log_probs"].values()
    return worker, rows, frozen, reference, after


def test_only_the_adapters_learn_and_the_reference_stays():
    worker, rows, frozen, reference, after = train(1)
    now = dict(worker.module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    torch.testing.assert_close(reference, rows["old_log_probs"].values(), atol=0, rtol=0)
    assert torch.equal(reference, after)
    assert not torch.equal(worker.compute_log_probs(rows, TEMPERATURE)[1]["old_log_probs"].values(), after)
    assert all(".lora_" in name for name in worker.state()["tensors"] if name != "rank.rng")


def test_siblings_read_their_prompt_once_through_adapters_and_score_as_apart():
    lm = build_causal_lm(LORA, 0)
    add_adapters(lm, LORA.lora, 0)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 12]])
    mask = torch.arange(6).expand(2, 6) >= 4
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for shares in (True, False):
        policy = PolicyModel(lm, shares_prompts=shares)
        assert policy.shares_prompts is shares
        lm.zero_grad()
        log_probs = policy(ids, mask)[0]
        log_probs.sum().backward()
        gradients = {name: one.grad.clone() for name, one in lm.named_parameters() if one.grad is not None}
        found.append((log_probs.detach(), gradients))
    (shared, ours), (apart, theirs) = found
    torch.testing.assert_close(shared, apart, atol=2e-5, rtol=1e-5)
    assert largest_gap(ours, theirs) < 2e-4


def test_a_target_that_no_layer_is_called_is_refused_although_another_one_is_there():
    lora = LoraConfig(rank=2, target_modules=("q_proj", "gate"))
    with pytest.raises(ValueError, match=r"has \['gate'\], which no layer of the model is called; .*'gate_proj'"):
        actor(LORA.model_copy(update={"lora": lora}))


def test_three_exports_send_the_merged_weight_each_time_and_leave_the_base():
    """W=2, A=2, B=1, scale 0.5: 3 is sent each time, W stays 2."""
    layer = nn.Linear(1, 1, bias=False)
    model = nn.ModuleDict({"q_proj": layer})
    model.config = {"model_type": "none"}
    add_adapters(model, LoraConfig(rank=1, alpha=0.5, target_modules=("q_proj",)), seed=0)
    adapter = adapter_layers(model)["q_proj"]
    with torch.no_grad():
        adapter.base_layer.weight.fill_(2.0)  # pyright: ignore[reportCallIssue]
        adapter.lora_A["default"].weight.fill_(2.0)  # pyright: ignore[reportCallIssue]
        adapter.lora_B["default"].weight.fill_(1.0)  # pyright: ignore[reportCallIssue]
    for _ in range(3):
        assert {name: float(tensor) for name, tensor in merged_tensors(model)} == {"q_proj.weight": 3.0}
        assert float(adapter.base_layer.weight) == 2.0
    assert merged_names(model) == ["q_proj.weight"]


def test_the_exported_names_are_those_of_the_model_without_adapters():
    with_adapters, without = actor(LORA), actor(MODEL)
    assert sorted(with_adapters.expected_names()) == sorted(without.expected_names())
    assert largest_gap(weights_of(with_adapters), weights_of(without)) == 0.0


def test_an_actor_without_adapters_refuses_to_be_its_own_reference():
    with pytest.raises(ValueError, match="no adapters to switch off"):
        actor(MODEL).score_reference(make_rows(2))


def train_and_export(dp_size):
    worker, _, _, reference, after = train(dp_size)
    return reference, after, weights_of(worker)


def test_two_ranks_train_the_same_adapters_as_one():
    alone = train_and_export(1)
    for reference, after, weights in run_ranked(train_and_export, 2, 2):
        torch.testing.assert_close(reference, alone[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(reference, after)
        assert largest_gap(weights, alone[2]) < 2e-5
