"""Graders for tests: importable by path."""

import asyncio
from collections.abc import Sequence


async def patient(response: str) -> float:
    """Waits, and gives the length."""
    await asyncio.sleep(0.05)
    return float(len(response))


def tied(responses: Sequence[str]) -> list[float]:
    """One a response, for a whole group."""
    return [1.0 / len(responses) for _ in responses]
