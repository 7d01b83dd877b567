"""Attention by matrix products in bfloat16 on a CPU, against float64 and against torch's own kernel."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.model import ModelConfig, ModelShape
from resources.models import row_attention
from resources.models.causal_lm import build_causal_lm

SHAPE = ModelShape(
    num_layers=1, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, vocab_size=100, max_positions=64
)


def inputs(rows: int, heads: int, kv_heads: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value and a gradient, in bfloat16; scores of some units, as trained models have."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(rows, n, tokens, 16, generator=draw).mul(1.5).bfloat16() for n in sizes]


def run(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and the three gradients, in float64."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = attend(*leaves)
    output.backward(grad.to(output.dtype))
    return [x.detach().double() for x in (output, *(leaf.grad for leaf in leaves))]


def by_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def by_matmuls(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return row_attention._MatmulAttention.apply(query, key, value, query.shape[-1] ** -0.5)


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "tokens"), [(3, 4, 2, 9), (2, 3, 1, 40), (2, 2, 2, 1)])
def test_output_and_gradients_err_no_more_than_twice_as_much_as_torchs_kernel(rows, heads, kv_heads, tokens):
    given = inputs(rows, heads, kv_heads, tokens)
    exact = run(by_kernel, *(x.double() for x in given))
    for name, ours, theirs, true in zip(
        ("output", "query", "key", "value"), run(by_matmuls, *given), run(by_kernel, *given), exact, strict=True
    ):
        error, usual = ((x - true).norm() / true.norm().clamp(min=1e-9) for x in (ours, theirs))
        assert float(error) <= max(2 * float(usual), 2**-8), name


def test_a_later_token_changes_nothing_before_it():
    query, key, value, _ = inputs(1, 2, 1, 6)
    before = by_matmuls(query, key, value)
    for x in (query, key, value):
        x[:, :, 4:] = 50.0
    assert torch.equal(by_matmuls(query, key, value)[:, :, :4], before[:, :, :4])


def test_rows_in_parts_are_rows_at_once(monkeypatch: pytest.MonkeyPatch):
    given = inputs(5, 4, 2, 8)
    whole = run(by_matmuls, *given)
    monkeypatch.setattr(row_attention, "_SCORES_BYTES", 1)
    assert all(torch.equal(part, one) for part, one in zip(run(by_matmuls, *given), whole, strict=True))


def test_short_rows_in_bfloat16_go_by_matmuls_and_others_as_before(monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []
    real = row_attention._MatmulAttention.apply
    monkeypatch.setattr(
        row_attention._MatmulAttention, "apply", lambda q, *more: used.append(q.shape[2]) or real(q, *more)
    )
    model = build_causal_lm(ModelConfig(build="tiny", shape=SHAPE), 0).model
    ids = torch.randint(0, 100, (2, 12))
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).last_hidden_state
        assert used == []
        half = model.bfloat16()(input_ids=ids, use_cache=False).last_hidden_state
        assert used == [12]
        monkeypatch.setattr(row_attention, "LONGEST_OF_MATMULS", 11)
        model(input_ids=ids, use_cache=False)
        # A padded batch has a mask, a decoding step fewer queries than keys.
        monkeypatch.setattr(row_attention, "LONGEST_OF_MATMULS", 384)
        model(input_ids=ids, attention_mask=torch.tensor([[0, 0, *[1] * 10]] * 2), use_cache=False)
        assert used == [12]
    torch.testing.assert_close(half.float(), exact, atol=0.1, rtol=0.1)


def test_eager_attention_stays_eager():
    model = build_causal_lm(ModelConfig(build="tiny", shape=SHAPE, attention="eager"), 0)
    assert not row_attention.attend_by_rows(model)
    assert model.config._attn_implementation == "eager"
