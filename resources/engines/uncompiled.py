"""Sampling without a compiler, for an eager engine on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def uncompiled(sampler: Any) -> Iterator[None]:
    """Keep vLLM's sampler (its module is given) from spending some 12 s in a C++ compiler at its first call.

    What it compiles is the rank of each sampled token, which nobody here reads. Uncompiled it would be the slowest part
    of a step with a large vocabulary, so it is left out as well.
    """
    ranks = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = _no_ranks
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        sampler.batched_count_greater_than = ranks


def _no_ranks(log_probs: Tensor, _sampled: Tensor) -> Tensor:
    return torch.zeros(log_probs.shape[0], dtype=torch.int64)
