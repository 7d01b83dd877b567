"""Rows of a pass without their padding, and the prompt that siblings answer once for all of them.

G rows [prompt | response] compute their prompt G times, with the same states each time, and all rows are as long as
the longest. Here every distinct token that is needed stands once in one sequence [1, N]; only attention sees rows
(`row_attention.py`). States and gradients are those of the rows apart, up to rounding.
"""

import inspect
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from resources.models.row_attention import Rows, attend_by_rows

LEAST_GAIN = 0.1
"""Share of a pass's tokens that has to go; dealing them out to rows and back costs about as much as that."""
_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class PackedPass:
    """One forward pass over the distinct tokens of some rows."""

    input_ids: Tensor
    """[1, N]."""
    position_ids: Tensor
    """[1, N]: where each token stands in its own row."""
    rows: Rows
    wanted: Tensor
    """[M]: of the N states those that predict the wanted tokens, in the order of the rows."""

    def states(self, trunk: nn.Module) -> Tensor:
        """[M, H]. A state that several responses begin from comes once for each; its gradients add up."""
        hidden = trunk(
            input_ids=self.input_ids,
            # With four dimensions a mask is taken as it is: transformers makes none of its own, and ours reads none.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            position_ids=self.position_ids,
            use_cache=False,
            rows=self.rows,
        ).last_hidden_state
        return F.embedding(self.wanted, hidden[0])


@torch.no_grad()
def can_pack(model: PreTrainedModel, trunk: nn.Module) -> bool:
    """Whether the model attends everywhere by `sdpa`, which `row_attention.py` stands in for, to all that came before.

    What its config cannot tell (positions that are no input, layers that pass states on) two short rows do.
    """
    facts = model.config.get_text_config()
    is_full = all(kind == "full_attention" for kind in getattr(facts, "layer_types", None) or ())
    slides = getattr(facts, "sliding_window", None) and getattr(facts, "use_sliding_window", True)
    takes_more = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(trunk.forward).parameters.values())
    if not is_full or slides or not takes_more or not attend_by_rows(model):
        return False
    rows = torch.tensor([[0, 1, 2, 3, 1], [0, 1, 3, 2, 2]], device=model.device)
    needed = torch.tensor([[False, True, True, True, False]] * 2, device=model.device)
    packed = pack_rows(rows, needed)
    assert packed is not None
    apart = trunk(input_ids=rows, use_cache=False).last_hidden_state[needed]
    try:
        together = packed.states(trunk)
    except TypeError:  # A layer that hands on what it knows by name, and no `rows`.
        return False
    return bool(torch.allclose(together, apart, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE))


def pack_rows(input_ids: Tensor, next_mask: Tensor) -> PackedPass | None:
    """The pass that gives the states where `next_mask` holds; None where rows by themselves cost as much.

    Args:
        input_ids: [B, T] right-padded rows of one sequence each.
        next_mask: [B, T] bool, true at states whose next token is wanted.
    """
    ids, needed = input_ids.cpu().numpy(), next_mask.cpu().numpy()
    siblings = _siblings(ids, needed)
    starts, ends = needed.argmax(axis=1) + 1, needed.shape[1] - needed[:, ::-1].argmax(axis=1)
    # (row, from, to): a group's prompt, as its first row has it, and the rest of each of its rows.
    pieces = [
        piece
        for rows in siblings
        for piece in [(rows[0], 0, int(starts[rows[0]])), *((row, int(starts[row]), int(ends[row])) for row in rows)]
    ]
    if not pieces or sum(end - start for _, start, end in pieces) > (1.0 - LEAST_GAIN) * ids.size:
        return None
    width = max(end for _, _, end in pieces)
    origin = np.concatenate([row * width + np.arange(start, end) for row, start, end in pieces])
    place = np.zeros((ids.shape[0], width), dtype=np.int64)
    place.reshape(-1)[origin] = np.arange(origin.size)
    for rows in siblings:
        start = starts[rows[0]]
        place[rows[1:], :start] = place[rows[0], :start]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(input_ids.device)

    return PackedPass(
        input_ids=on_device(ids[:, :width].reshape(-1)[origin])[None],
        position_ids=on_device(origin % width)[None],
        rows=Rows(place=on_device(place), origin=on_device(origin)),
        wanted=on_device(place[needed[:, :width]]),
    )


def _siblings(ids: np.ndarray, needed: np.ndarray) -> list[list[int]]:
    """Rows whose tokens up to the first needed state are the same, together; rows of which nothing is needed go."""
    found: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(needed.any(axis=1)):
        found.setdefault(ids[row, : int(needed[row].argmax()) + 1].tobytes(), []).append(int(row))
    return list(found.values())
