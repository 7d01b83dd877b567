"""Rows without padding and repeated prompts, against the same rows apart."""

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
from resources.models.packed_rows import can_pack, pack_rows
from resources.models.policy import PolicyModel

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


def test_a_prompt_of_three_and_two_responses_stand_once_each():
    ids, mask = rows_of([[5, 6, 7]], [[[8, 9], [10]]])
    packed = pack_rows(ids, following(mask))
    assert packed is not None
    # The last token of a response predicts nothing that is wanted, so it is not read; 10 needs the prompt alone.
    assert packed.input_ids.tolist() == [[5, 6, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.wanted.tolist() == [2, 3, 2]
    assert packed.rows.origin.tolist() == [0, 1, 2, 3]
    assert packed.rows.place[:, :3].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_responses_of_two_groups_follow_their_prompts_at_their_own_positions():
    ids, mask = rows_of([[5, 6, 7, 8], [9, 9]], [[[10, 11, 12], [20, 21]], [[30, 31], [40, 41, 42]]])
    packed = pack_rows(ids, following(mask))
    assert packed is not None
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 10, 11, 20, 9, 9, 30, 40, 41]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 0, 1, 2, 2, 3]]
    # Rows in order: first responses to both prompts, then second ones; where a row has ended stands anything.
    assert packed.rows.place.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [7, 8, 9, 0, 0, 0],
        [0, 1, 2, 3, 6, 0],
        [7, 8, 10, 11, 0, 0],
    ]
    assert packed.rows.origin.tolist() == [0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 20, 21]
    assert packed.wanted.tolist() == [3, 4, 5, 8, 9, 3, 6, 8, 10, 11]


def test_dealing_out_and_packing_are_inverse_and_sum_the_gradients_of_copies():
    ids, mask = rows_of([[5, 6, 7]], [[[8, 9], [10, 11]]])
    packed = pack_rows(ids, following(mask))
    assert packed is not None
    states = torch.randn(1, 2, 5, 3).requires_grad_()
    dealt = packed.rows.deal_out(states)
    assert dealt.shape == (2, 2, 4, 3)
    assert torch.equal(packed.rows.pack(dealt.transpose(1, 2)), states.transpose(1, 2))
    dealt.sum().backward()
    assert states.grad is not None
    assert states.grad[0, 0, :, 0].tolist() == [2.0, 2.0, 2.0, 1.0, 1.0], "the prompt stands in both rows"


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


def test_rows_as_long_as_each_other_without_siblings_or_anything_wanted_go_as_they_are():
    ids, mask = rows_of([[5, 6], [7, 8]], [[[9, 9, 9, 9, 9, 9, 9, 9, 9]]] * 2)
    assert pack_rows(ids, following(mask)) is None
    assert pack_rows(ids, torch.zeros_like(mask)) is None


def test_padding_is_left_out_without_siblings_too():
    ids, mask = rows_of([[5, 6], [7, 8]], [[[9] * 9], [[9]]])
    packed = pack_rows(ids, following(mask))
    assert packed is not None
    assert packed.input_ids.tolist() == [[5, 6, *[9] * 8, 7, 8]]


def test_a_window_and_another_attention_are_not_packed():
    slides = MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=16))
    assert not can_pack(slides, slides.model)
    eager = build_causal_lm(TINY.model_copy(update={"attention": "eager"}), 0)
    assert not can_pack(eager, eager.model)
    assert not PolicyModel(eager, shares_prompts=True).shares_prompts


def test_a_model_that_does_not_read_its_positions_is_not_packed():
    model = build_causal_lm(TINY, 0)
    plain = model.model.forward
    model.model.forward = lambda position_ids=None, **rest: plain(**rest)
    assert not can_pack(model, model.model)


def test_a_model_whose_layers_take_no_more_than_they_name_is_not_packed():
    model = build_causal_lm(TINY, 0)
    plain = model.model.forward
    model.model.forward = lambda input_ids=None, attention_mask=None, position_ids=None, use_cache=None: plain(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
    )
    assert not can_pack(model, model.model)


def test_a_layer_that_refuses_rows_is_found_when_the_model_is_loaded():
    model = build_causal_lm(TINY, 0)
    layer = model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda hidden, attention_mask=None, position_ids=None, position_embeddings=None, **rest: (
        plain(hidden, attention_mask=attention_mask, position_ids=position_ids, position_embeddings=position_embeddings)
        if "rows" not in rest
        else no_rows()
    )

    def no_rows() -> Tensor:
        raise TypeError("forward() got an unexpected keyword argument 'rows'")

    assert not can_pack(model, model.model)


def test_the_policy_counts_the_tokens_it_computes():
    ids, mask = rows_of([[5, 6, 7]], [[[8, 9], [10, 11]]])
    policy = PolicyModel(build_causal_lm(TINY, 0), shares_prompts=True)
    policy(ids, mask)
    assert policy.tokens_computed == 5
    policy(ids, mask, position_ids=torch.arange(5).expand(2, 5))
    assert policy.tokens_computed == 5 + 10
