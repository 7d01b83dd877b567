"""Copies in the dtype of the arithmetic: gradients of the plain cast module, on float32 masters."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from configs.model import OptimizerConfig
from resources.models.optimizers import RoleOptimizer
from resources.models.sharding import CommunicationClock, ParallelLayout, release_gathered, shard_module
from resources.models.working_copies import WorkingCopies


class TiedModel(nn.Module):
    """An embedding that is the output head too, and a frozen matrix between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.frozen(self.embedding(ids)))).logsumexp(-1).float().sum()


IDS = (torch.tensor([[1, 4, 4], [9, 0, 2]]), torch.tensor([[3, 3, 7]]))


def test_gradients_of_two_passes_are_the_cast_modules_added_up_in_float32():
    model = TiedModel()
    expected = torch.zeros(11, 6)
    for ids in IDS:
        cast = copy.deepcopy(model).bfloat16()
        cast(ids).backward()
        expected += cast.embedding.weight.grad.float()
    copies = WorkingCopies(model, torch.bfloat16)
    for ids in IDS:
        model(ids).backward()
    copies.put_back()
    assert model.embedding.weight.grad.dtype == torch.float32
    assert torch.equal(model.embedding.weight.grad, expected)
    assert model.frozen.weight.grad is None


def test_a_pass_computes_in_the_other_dtype_and_put_back_restores_the_very_masters():
    model = TiedModel()
    before = dict(model.named_parameters(remove_duplicate=False))
    copies = WorkingCopies(model, torch.bfloat16)
    with torch.no_grad():
        model(IDS[0])
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert model.head.weight is model.embedding.weight
    copies.put_back()
    copies.put_back()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_pass_after_a_step_sees_the_new_weights():
    model = TiedModel()
    copies = WorkingCopies(model, torch.bfloat16)
    with torch.no_grad():
        model(IDS[0])
        copies.put_back()
        model.embedding.weight.fill_(0.5)
        # Six ones times 0.5 go through tanh(W 0.5) and back through 0.5: equal logits, so log(11) above each.
        logit = 0.5 * torch.tanh(model.frozen.weight.bfloat16().float().sum(1) * 0.5).sum()
        assert float(model(IDS[1])) == pytest.approx(3 * (float(logit) + torch.tensor(11.0).log().item()), rel=1e-2)


def test_masters_are_gone_from_their_places_for_no_longer_than_a_failing_pass():
    model = TiedModel()
    masters = list(model.parameters())
    copies = WorkingCopies(model, torch.bfloat16)
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    copies.put_back()
    assert all(now is then for now, then in zip(model.parameters(), masters, strict=True))


def test_a_module_on_one_rank_is_not_kept_by_what_knows_its_copies():
    model = TiedModel()
    shard_module(
        model, ParallelLayout(), dtype="bfloat16", fsdp=True, device=torch.device("cpu"), clock=CommunicationClock()
    )
    model(IDS[0]).backward()
    assert model.embedding.weight.dtype == torch.bfloat16
    release_gathered(model)
    assert model.embedding.weight.dtype == torch.float32
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_recomputed_layers_see_the_copies_too():
    """Gradient checkpointing runs the forward pass again inside the backward pass."""
    plain, checkpointed = TiedModel(), TiedModel()
    inner = checkpointed.frozen.forward
    checkpointed.frozen.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
    for model in (plain, checkpointed):
        copies = WorkingCopies(model, torch.bfloat16)
        model(IDS[0]).backward()
        copies.put_back()
    assert torch.equal(plain.embedding.weight.grad, checkpointed.embedding.weight.grad)


def kept_copies(model: nn.Module) -> WorkingCopies:
    copies = WorkingCopies(model, torch.bfloat16, keeps=True)
    with torch.no_grad():
        model(IDS[0])
    return copies


def addresses(model: nn.Module) -> list[int]:
    """Of what a pass computes with."""
    seen: list[int] = []
    look = model.embedding.register_forward_hook(lambda part, *_: seen.append(part.weight.data_ptr()))
    with torch.no_grad():
        model(IDS[0])
    look.remove()
    return seen


def test_kept_copies_are_the_next_passes_and_the_exports_own():
    model = TiedModel()
    copies = kept_copies(model)
    used = model.embedding.weight.data_ptr()
    copies.put_back()
    sent = dict(copies.in_place_of([("e", model.embedding.weight.detach()), ("other", torch.ones(11, 6))]))
    assert (sent["e"].data_ptr(), sent["e"].dtype) == (used, torch.bfloat16)
    assert sent["other"].dtype == torch.float32
    assert addresses(model) == [used]
    copies.put_back()
    copies.drop()
    assert copies._copies == {}


@pytest.mark.parametrize("way", ["in place", "detached", "optimizer", "moved"])
def test_a_kept_copy_of_weights_that_changed_is_not_used_again(way: str):
    model = TiedModel()
    copies = kept_copies(model)
    copies.put_back()
    weight = model.embedding.weight
    with torch.no_grad():
        if way == "in place":
            weight.fill_(0.5)
        elif way == "detached":
            weight.detach().copy_(torch.full((11, 6), 0.5))
        elif way == "moved":
            weight.data = torch.full((11, 6), 0.5)
    if way == "optimizer":
        weight.grad = torch.ones(11, 6)
        optimizer = RoleOptimizer([("e", weight)], OptimizerConfig(lr=0.1))
        optimizer.step()
    [(_, sent)] = copies.in_place_of([("e", weight.detach())])
    assert torch.equal(sent, weight.detach().bfloat16())
    with torch.no_grad():
        model(IDS[0])
    assert torch.equal(model.embedding.weight, weight.detach().bfloat16())


def test_kept_copies_train_as_fresh_ones_do():
    kept, fresh = TiedModel(), TiedModel()
    held = kept_copies(kept)
    for model, copies in ((kept, held), (fresh, WorkingCopies(fresh, torch.bfloat16))):
        copies.put_back()
        for ids in IDS:
            model(ids).backward()
        copies.put_back()
    assert torch.equal(kept.embedding.weight.grad, fresh.embedding.weight.grad)
    assert kept.embedding.weight.grad.dtype == torch.float32
