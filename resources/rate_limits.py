"""Limits of a service that several workers keep together: requests at a time, requests and tokens a minute.

The workers know nothing of each other: each keeps to a share that adds up to the limit whatever the others do.
"""

import asyncio
import math
import time


def share_of(limit: int, rank: int, world_size: int) -> int:
    """What worker `rank` of `world_size` may have of `limit` at a time; all of them together have `limit`.

    >>> [share_of(5, rank, 2) for rank in range(2)], [share_of(1, rank, 4) for rank in range(4)]
    ([3, 2], [1, 0, 0, 0])
    """
    return limit // world_size + (rank < limit % world_size)


class RateLimit:
    """Admits `per_minute` units a minute over all workers, in bursts of at most a second's worth, first come first.

    Each worker admits what it would if all of them began to ask at the same moment, in the order of their ranks: as
    they do with every batch. So a burst is that of all workers together as well.

    >>> import asyncio
    >>> asyncio.run(RateLimit(6000).take(1))
    """

    def __init__(self, per_minute: float | None, rank: int = 0, world_size: int = 1) -> None:
        """None: no limit."""
        self._per_second = None if per_minute is None else per_minute / 60.0
        self._burst = max(1.0, self._per_second or 0.0)
        self._rank, self._world_size = rank, world_size
        self._due = -math.inf
        """When the next unit would go if there were no bursts."""
        self._lock = asyncio.Lock()

    async def take(self, units: float) -> None:
        """Wait until `units` may go. More than a burst goes on credit: those behind wait for longer."""
        if self._per_second is None:
            return
        seconds = units / self._per_second
        async with self._lock:
            now = time.monotonic()
            is_idle = now > self._due + self._world_size * seconds
            due = now + self._rank * seconds if is_idle else max(self._due, now)
            wait = due - now - max(0.0, self._burst - units) / self._per_second
            if wait > 0.0:
                await asyncio.sleep(wait)
            self._due = due + self._world_size * seconds
