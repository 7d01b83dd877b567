"""The bookkeeping of one weight update while it streams into an engine."""

import time
from collections.abc import Collection, Iterator

from torch import Tensor

from resources.engines.base import WeightReport, Weights, check_names, counted

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

    def report(self, version: int) -> WeightReport:
        """What came, once it is in force."""
        return WeightReport(
            version=version,
            names=tuple(self.seen),
            num_bytes=sum(self.seen.values()),
            seconds=time.monotonic() - self.started,
            aliases=tuple(self.aliases),
        )


class TakesUpdates:
    """Mixin of an engine: the update that is under way, and whether what it holds may be sampled with."""

    _update: WeightUpdate | None = None
    _broken: str | None = None
    """Why its weights are none of any version; None when they are."""

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise RuntimeError("no weight update is open; call begin_update first")
        return self._update

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"the engine has no valid weights ({self._broken}); send a whole new version first")
