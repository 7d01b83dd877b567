"""The bookkeeping of one weight update while it streams into an engine."""

import time
from collections.abc import Collection, Iterator

from torch import Tensor

from resources.engines.base import Weights, counted


class WeightUpdate:
    """One weight update while it streams in."""

    def __init__(self, expected: Collection[str]) -> None:
        self.expected = frozenset(expected)
        self.seen: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.aliases: list[str] = []
        self.last = ""
        self.started = time.monotonic()

    def take(self, weights: Weights, tied_head: str | None) -> Iterator[tuple[str, Tensor]]:
        """Pass weights on; a tied head gets the embedding's tensor under its own name too.

        Without that name vLLM on a CPU keeps the old head (it holds a packed copy of its own), and says nothing.
        """
        for name, tensor in counted(weights, self.seen):
            self.last = name
            if tied_head is not None and name == tied_head:
                continue  # comes as an alias of the embedding, below
            yield name, tensor
            if tied_head is not None and name.endswith("embed_tokens.weight"):
                self.aliases.append(tied_head)
                yield tied_head, tensor
