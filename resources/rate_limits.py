"""Limits of a service: how many requests and tokens a minute, waited for instead of refused."""

import asyncio
import time


class RateLimit:
    """Admits `per_minute` units a minute, in bursts of at most a second's worth, first come first.

    >>> import asyncio
    >>> asyncio.run(RateLimit(6000).take(1))
    """

    def __init__(self, per_minute: float | None) -> None:
        """None: no limit."""
        self._per_second = None if per_minute is None else per_minute / 60.0
        self._burst = max(1.0, self._per_second or 0.0)
        self._left = self._burst
        self._at = time.monotonic()
        self._lock = asyncio.Lock()

    async def take(self, units: float) -> None:
        """Wait until `units` may go. More than a burst goes on credit: those behind wait for longer."""
        if self._per_second is None:
            return
        async with self._lock:
            self._refill()
            wanted = min(units, self._burst)
            if self._left < wanted:
                await asyncio.sleep((wanted - self._left) / self._per_second)
                self._refill()
            self._left -= units

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * (self._per_second or 0.0))
        self._at = now
