"""The bookkeeping of one weight update while it streams into an engine."""

import time
from collections.abc import Collection, Iterator

from torch import Tensor

from resources.engines.base import Weights, check_names, counted

EMBEDDING = "embed_tokens.weight"


class WeightUpdate:
    """One weight update while it streams in."""

    def __init__(self, tied_head: str | None) -> None:
        """`tied_head`: name of an output head that shares the embedding's memory, if there is one."""
        self.tied_head = tied_head
        self.seen: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.aliases: list[str] = []
        self.last = ""
        self.started = time.monotonic()

    def take(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass weights on; a tied head gets the embedding's tensor under its own name, whether it was sent or not.

        Without that name vLLM on a CPU keeps the old head (it holds a packed copy of its own), and says nothing.
        """
        for name, tensor in counted(weights, self.seen):
            self.last = name
            if name == self.tied_head:
                continue
            yield name, tensor
            if self.tied_head is not None and name.endswith(EMBEDDING):
                self.aliases.append(self.tied_head)
                yield self.tied_head, tensor

    def check_names(self, expected: Collection[str]) -> None:
        """Raise WeightMismatchError unless the names that came are the expected ones; a tied head may stand or not."""
        tied = {self.tied_head}
        check_names(self.seen.keys() - tied, set(expected) - tied)
