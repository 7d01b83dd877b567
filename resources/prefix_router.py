"""Which replica gets a request: the least loaded, or the one that has its beginning in the cache, if it is not busy."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 16
"""Tokens whose hash is looked up together; vLLM caches prefixes in blocks of this size."""
MAX_PREFIXES = 65_536
SLACK = 4
"""Requests more than the least loaded that the cache is worth."""


class PrefixRouter:
    """Remembers where beginnings of prompts went.

    >>> router = PrefixRouter()
    >>> turn = list(range(32))
    >>> router.route(turn, {0: 3, 1: 1})
    1
    >>> router.route([*turn, 7, 8], {0: 0, 1: 4}), router.route([*turn, 7, 8], {0: 0, 1: 9})
    (1, 0)
    """

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def route(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """A key of `loads` (replica -> requests it has): the one with the longest known beginning, else the least."""
        keys = _prefix_keys(prompt_ids)
        least = min(loads, key=lambda replica: (loads[replica], replica))
        known = next((self._places[key] for key in reversed(keys) if self._places.get(key) in loads), None)
        chosen = known if known is not None and loads[known] <= loads[least] + SLACK else least
        for key in keys:
            self._places[key] = chosen
            self._places.move_to_end(key)
        while len(self._places) > MAX_PREFIXES:
            self._places.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """Its cache is gone, after a death or with new weights."""
        for key in [key for key, place in self._places.items() if place == replica]:
            del self._places[key]


def _prefix_keys(ids: Sequence[int]) -> list[bytes]:
    """A hash for each whole block, of everything up to its end."""
    digest = hashlib.blake2b(digest_size=12)
    keys: list[bytes] = []
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        digest.update(b",".join(str(token).encode() for token in ids[end - BLOCK : end]))
        keys.append(digest.copy().digest())
    return keys
