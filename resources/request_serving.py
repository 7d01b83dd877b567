"""The engine's end of single requests: one call brings new requests, decodes a few steps, and takes home what finished.

A worker does one call at a time, so continuous batching is a chain of short calls, the next one always on its way.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from resources.dispatch import Dispatch, dispatch
from resources.engines.base import Engine, GenerationOutput, GenerationRequest, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a replica is to do next."""

    add: tuple[tuple[GenerationRequest, Sampling], ...] = ()
    abort: tuple[int, ...] | None = ()
    """Row ids to end; None ends all."""
    steps: int = 8
    """Decode steps at most."""
    least_steps: int = 1
    """A call also ends with the step in which a response finishes, from this one on. Where responses of many lengths
    are sampled together, one finishes in nearly every step, and a call a step would cost more than the answers wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a replica did."""

    finished: list[GenerationOutput] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Row ids of requests that the engine cannot answer, and why."""
    version: int
    """Policy version of the engine during the call; every token of the call was sampled with it."""
    steps: int = 0
    seconds: float = 0.0


class ServesRequests:
    """Mixin of the rollout worker: `engine` comes from the worker."""

    engine: Engine

    @dispatch(Dispatch.BROADCAST)
    def serve(self, orders: Orders) -> Report:
        """Carry out `orders`. Tensor-parallel peers get the same, and count steps, not seconds: they stay together."""
        started = time.monotonic()
        finished: list[GenerationOutput] = []
        if orders.abort is None or orders.abort:
            finished += self.engine.abort(orders.abort)
        refused = self._add(orders)
        steps = 0
        while steps < orders.steps and self.engine.has_unfinished():
            if finished and steps >= orders.least_steps:
                break
            finished += self.engine.step()
            steps += 1
        return Report(
            finished=finished,
            refused=refused,
            version=self.engine.policy_version,
            steps=steps,
            seconds=time.monotonic() - started,
        )

    @dispatch(Dispatch.BROADCAST)
    def engine_version(self) -> int:
        """Policy version of the engine's weights."""
        return self.engine.policy_version

    def _add(self, orders: Orders) -> list[tuple[int, str]]:
        refused: list[tuple[int, str]] = []
        for request, sampling in orders.add:
            try:
                self.engine.add_request(request, sampling)
            except ValueError as error:
                refused.append((request.row_id, str(error)))
        return refused


def aborting(row_ids: Collection[int] | None) -> Orders:
    """Orders that only end responses."""
    return Orders(abort=None if row_ids is None else tuple(row_ids), steps=0)
