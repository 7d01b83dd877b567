"""Siblings that read their prompt once, against the same rows apart."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from configs.model import ModelConfig, ModelShape
from resources.models.causal_lm import build_causal_lm
from resources.models.policy import PolicyModel
from resources.models.shared_prompts import can_share, share_prompts

SHAPE = ModelShape(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, vocab_size=100, max_positions=64
)
TINY = ModelConfig(build="tiny", shape=SHAPE)
SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: build_causal_lm(TINY, 0),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8)),
}


def rows_of(prompts: list[list[int]], responses: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """[B, T] ids, right-padded with 0, and the mask of the responses; siblings are dealt out in turns."""
    pairs = [(prompts[p], responses[p][g]) for g in range(len(responses[0])) for p in range(len(prompts))]
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    ids, mask = torch.zeros(len(pairs), width, dtype=torch.int64), torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        mask[row, len(prompt) : end] = True
    return ids, mask


def groups(seed: int = 0, num_prompts: int = 3, siblings: int = 4) -> tuple[Tensor, Tensor]:
    """Prompts of 8 to 12 tokens, responses of 1 to 9."""
    draw = torch.Generator().manual_seed(seed)

    def text(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=draw))
        return torch.randint(4, 100, (length,), generator=draw).tolist()

    prompts = [text(8, 12) for _ in range(num_prompts)]
    return rows_of(prompts, [[text(1, 9) for _ in range(siblings)] for _ in prompts])


def following(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def test_a_prompt_of_three_and_two_responses_become_one_sequence():
    ids, mask = rows_of([[5, 6, 7]], [[[8, 9], [10]]])
    shared = share_prompts(ids, following(mask), 32)
    assert shared is not None
    # The last token of a response predicts nothing that is wanted, so it is not read; 10 needs the prompt alone.
    assert shared.input_ids.tolist() == [[5, 6, 7, 8]]
    assert shared.position_ids.tolist() == [[0, 1, 2, 3]]
    assert shared.wanted.tolist() == [2, 3, 2]
    assert shared.attention[0, 0].tolist() == torch.ones(4, 4).tril().bool().tolist()


def test_a_response_attends_to_the_prompt_and_itself_at_its_own_positions():
    ids, mask = rows_of([[5, 6, 7, 8]], [[[10, 11, 12], [20, 21, 22]]])
    shared = share_prompts(ids, following(mask), 32)
    assert shared is not None
    assert shared.input_ids.tolist() == [[5, 6, 7, 8, 10, 11, 20, 21]]
    assert shared.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5]]
    assert shared.wanted.tolist() == [3, 4, 5, 3, 6, 7]
    looks = shared.attention[0, 0].int().tolist()
    assert looks[5] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert looks[7] == [1, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("seed", range(3))
def test_log_probs_entropies_and_gradients_are_those_of_the_rows_apart(family: str, seed: int):
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    ids, mask = groups(seed)
    weights = torch.rand(mask.shape)
    results: list[tuple[Tensor, Tensor, list[Tensor]]] = []
    for shares in (True, False):
        policy = PolicyModel(model, chunk_tokens=7, shares_prompts=shares)
        assert policy.shares_prompts is shares
        model.zero_grad()
        log_probs, entropy = policy(ids, mask, temperature=0.7, with_entropy=True)
        (log_probs * weights).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), [p.grad.clone() for p in model.parameters()]))
    (shared, entropies, gradients), (apart, expected, others) = results
    torch.testing.assert_close(shared, apart, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, expected, atol=2e-5, rtol=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_a_dialogue_whose_tool_results_are_not_wanted_is_scored_as_apart():
    model = build_causal_lm(TINY, 0)
    ids, mask = rows_of([list(range(10, 20))], [[[30, 31, 32, 33, 34, 35], [40, 41, 42, 43, 44, 45]]])
    mask[:, 12:14] = False
    torch.testing.assert_close(
        PolicyModel(model, shares_prompts=True)(ids, mask)[0], PolicyModel(model)(ids, mask)[0], atol=2e-5, rtol=1e-5
    )


def test_candidates_and_the_likeliest_tokens_are_those_of_the_rows_apart():
    model = build_causal_lm(TINY, 0)
    ids, mask = groups()
    candidates = torch.randint(4, 100, (*ids.shape, 3))
    for options in ({"candidates": candidates}, {"top_k": 4}):
        shared = PolicyModel(model, shares_prompts=True)(ids, mask, **options)
        apart = PolicyModel(model)(ids, mask, **options)
        for one, other in zip(shared, apart, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_the_same_rows_give_the_same_bits_each_time():
    policy = PolicyModel(build_causal_lm(TINY, 0), shares_prompts=True)
    ids, mask = groups(1)
    gradients: list[Tensor] = []
    for _ in range(2):
        policy.zero_grad()
        policy(ids, mask)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]).clone())
    assert torch.equal(*gradients)


def test_rows_without_siblings_or_without_anything_wanted_go_as_they_are():
    ids, mask = groups(siblings=1)
    assert share_prompts(ids, following(mask), 32) is None
    assert share_prompts(ids, torch.zeros_like(mask), 32) is None


def test_long_responses_to_a_short_prompt_cost_less_apart():
    """512 + 8 tokens each: the mask over all of them would be looked at in full."""
    ids, mask = rows_of([list(range(4, 12))], [[[20 + g] * 512 for g in range(8)]])
    assert share_prompts(ids, following(mask), 32) is None


def test_a_window_and_another_attention_do_not_share():
    slides = MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=16))
    assert not can_share(slides, slides.model)
    eager = build_causal_lm(TINY.model_copy(update={"attention": "eager"}), 0)
    assert not can_share(eager, eager.model)
    assert not PolicyModel(eager, shares_prompts=True).shares_prompts


def test_a_model_that_does_not_read_its_positions_does_not_share():
    model = build_causal_lm(TINY, 0)
    plain = model.model.forward
    model.model.forward = lambda position_ids=None, **rest: plain(**rest)
    assert not can_share(model, model.model)
