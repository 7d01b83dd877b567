"""Responses to one prompt that stand in one forward pass read it once.

A row [prompt | response] for each of G siblings computes the prompt G times, with the same states each time. Here they
become one sequence [prompt | response 1 | ... | response G] in which a response attends to the prompt and to itself,
at the positions it would have alone. States and gradients are those of the rows apart, up to rounding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LEAST_GAIN = 0.05
"""Share of a pass's cost that has to go; below it the plain rows, whose attention needs no mask, are as good."""
_PROBE_TOLERANCE = 1e-3
_ALL = -1
"""Segment of what every later token of its sequence may attend to."""


@dataclass(frozen=True, kw_only=True)
class SharedPass:
    """One forward pass over sequences with shared prompts."""

    input_ids: Tensor
    """[S, L], right-padded."""
    position_ids: Tensor
    """[S, L]: where each token stands in its own row."""
    attention: Tensor
    """[S, 1, L, L] bool: who attends to whom."""
    wanted: Tensor
    """[N]: of the S * L states those that predict the wanted tokens, in the order of the rows."""

    def states(self, trunk: nn.Module) -> Tensor:
        """[N, H]. A state that several responses begin from comes once for each; its gradients add up."""
        hidden = trunk(
            input_ids=self.input_ids, attention_mask=self.attention, position_ids=self.position_ids, use_cache=False
        ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, self.wanted)


@torch.no_grad()
def can_share(model: PreTrainedModel, trunk: nn.Module) -> bool:
    """Whether the model attends everywhere by `sdpa`, the way that takes a mask of ours, and to all that came before.

    What its config cannot tell (positions that are no input, layers that pass states on) two short rows do.
    """
    facts = model.config.get_text_config()
    is_full = all(kind == "full_attention" for kind in getattr(facts, "layer_types", None) or ())
    slides = getattr(facts, "sliding_window", None) and getattr(facts, "use_sliding_window", True)
    if facts._attn_implementation != "sdpa" or not is_full or slides:
        return False
    rows = torch.tensor([[0, 1, 2, 3, 1], [0, 1, 3, 2, 2]], device=model.device)
    needed = torch.tensor([[False, True, True, True, False]] * 2, device=model.device)
    shared = share_prompts(rows, needed, int(facts.hidden_size))
    assert shared is not None
    apart = trunk(input_ids=rows, use_cache=False).last_hidden_state[needed]
    return bool(torch.allclose(shared.states(trunk), apart, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE))


def share_prompts(input_ids: Tensor, next_mask: Tensor, hidden_size: int) -> SharedPass | None:
    """The pass that gives the states where `next_mask` holds; None where rows by themselves cost as much.

    Args:
        input_ids: [B, T] right-padded rows of one sequence each.
        next_mask: [B, T] bool, true at states whose next token is wanted.
        hidden_size: width of the model, which weighs its layers against its attention.
    """
    ids, needed = input_ids.cpu().numpy(), next_mask.cpu().numpy()
    siblings = _siblings(ids, needed)
    starts, ends = _first(needed) + 1, _past_last(needed)
    lengths = [starts[rows[0]] + sum(int(ends[row] - starts[row]) for row in rows) for rows in siblings]
    if not siblings or not _is_cheaper(len(siblings), max(lengths), ids.shape, hidden_size):
        return None
    sequences, longest = len(siblings), max(lengths)
    packed = np.zeros((sequences, longest), dtype=ids.dtype)
    positions = np.zeros((sequences, longest), dtype=np.int64)
    segments = np.zeros((sequences, longest), dtype=np.int64)
    place = np.zeros(ids.shape, dtype=np.int64)  # (row, position) -> place among all packed states
    for number, rows in enumerate(siblings):
        start = int(starts[rows[0]])
        packed[number, :start] = ids[rows[0], :start]
        positions[number, :start] = np.arange(start)
        segments[number, :start] = _ALL
        at = start
        for row in rows:
            own = np.arange(start, int(ends[row]))
            packed[number, at : at + own.size] = ids[row, own]
            positions[number, at : at + own.size] = own
            segments[number, at : at + own.size] = row + 1
            place[row, :start] = number * longest + np.arange(start)
            place[row, own] = number * longest + at + np.arange(own.size)
            at += own.size
    device = input_ids.device
    return SharedPass(
        input_ids=torch.from_numpy(packed).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention=_attention(torch.from_numpy(segments).to(device)),
        wanted=torch.from_numpy(place[needed]).to(device),
    )


def _siblings(ids: np.ndarray, needed: np.ndarray) -> list[list[int]]:
    """Rows whose tokens up to the first needed state are the same, together; rows of which nothing is needed go."""
    found: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(needed.any(axis=1)):
        found.setdefault(ids[row, : int(needed[row].argmax()) + 1].tobytes(), []).append(int(row))
    return list(found.values())


def _first(needed: np.ndarray) -> np.ndarray:
    return needed.argmax(axis=1)


def _past_last(needed: np.ndarray) -> np.ndarray:
    return needed.shape[1] - needed[:, ::-1].argmax(axis=1)


def _is_cheaper(sequences: int, longest: int, plain: tuple[int, ...], hidden_size: int) -> bool:
    """Operations of a layer over its width: 24 H a token, and 4 for each pair that attention looks at.

    Plain rows are attended to causally, which skips half of the pairs; a mask skips none.
    """
    rows, width = plain
    ours = sequences * longest * (24 * hidden_size + 4 * longest)
    theirs = rows * width * (24 * hidden_size + 2 * width)
    return ours < (1.0 - LEAST_GAIN) * theirs


def _attention(segments: Tensor) -> Tensor:
    """[S, 1, L, L]: to what came before, if it is the prompt's or of the same response. Padding looks at padding."""
    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    before, own = segments[:, None, :], segments[:, :, None]
    return ((before == _ALL) | (before == own)).logical_and_(earlier)[:, None]
