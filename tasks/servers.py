"""Pausing the rollout servers from the step that brings them new weights, whichever pool's host that step runs in."""

import contextlib
from collections.abc import Iterator

import ray

from resources.served_group import replicas_of
from tasks.host import host
from tasks.hosts import pools_of_roles

MARGIN_SECONDS = 30.0
"""For the answer of the other host, beyond what it waits itself."""


@contextlib.contextmanager
def sampling_paused(timeout: float) -> Iterator[None]:
    """A block in which no server samples a token; what runs is parked with the tokens it has, and goes on afterwards.

    Nothing to do in a run without servers. Raises TimeoutError, or RayActorError when the sampling host is gone.
    """
    context = host()
    if not replicas_of(context.groups):
        yield
        return
    peer = context.store.peers.get(pools_of_roles(context.config)["rollout"])
    if peer is None:
        context.pause_sampling(timeout)
    else:
        ray.get(peer.pause_sampling.remote(timeout), timeout=timeout + MARGIN_SECONDS)
    try:
        yield
    finally:
        if peer is None:
            context.resume_sampling()
        else:
            ray.get(peer.resume_sampling.remote(), timeout=MARGIN_SECONDS)
