"""Refuses requests that an engine would answer wrongly or not at all, naming the row."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from resources.engines.base import GenerationRequest, Sampling


def check_request(request: GenerationRequest, vocab_size: int, max_model_length: int) -> None:
    """Raise ValueError for an empty prompt, ids the model lacks, or a response that cannot fit."""
    if not request.prompt_ids:
        raise ValueError(f"row {request.row_id} has an empty prompt; a response needs at least one token before it")
    top = max(request.prompt_ids)
    if top >= vocab_size:
        raise ValueError(
            f"row {request.row_id} holds token id {top}; the engine's vocabulary has {vocab_size}. Tokenizer and model "
            "differ"
        )
    length = len(request.prompt_ids) + request.max_tokens
    if length > max_model_length:
        raise ValueError(
            f"row {request.row_id} needs {len(request.prompt_ids)} + {request.max_tokens} tokens; the engine was "
            f"started for {max_model_length}. Raise rollout.max_model_length or lower data.max_prompt_length"
        )


def check_peers(requests: Sequence[GenerationRequest], sampling: Sampling, group: Any, size: int) -> None:
    """Collective over the peers of one engine. Raise ValueError on all of them unless all were given the same.

    Tensor-parallel peers draw each token on their own; with other rows or seeds each would go on with other tokens.
    """
    text = repr((tuple((r.row_id, r.prompt_ids, r.seed, r.max_tokens) for r in requests), sampling))
    mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    hashes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(hashes, torch.tensor([mine]), group=group)
    values = [int(value) for value in hashes]
    if len(set(values)) > 1:
        raise ValueError(
            f"tensor-parallel peers were given different rows or seeds (hashes {values}); every peer of an engine must "
            "sample the same requests"
        )
