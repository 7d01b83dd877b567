"""What rollout servers keep of a request on its way, of a replica, and the answer that a caller gets."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.replicas import Replica
from resources.seeding import stream_seed


class RequestLostError(RuntimeError):
    """A request that no replica could answer: too many of them died under it, none is left, or time ran out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The answer to a request; the lists are as long as `token_ids`."""

    row_id: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version each token was sampled with."""
    finish_reason: FinishReason
    seconds: float
    replica: str
    dispatches: int
    """Replicas it was sent to because one was lost or stuck; 1 for most."""


@dataclass(slots=True)
class PendingRequest:
    """A request that was not answered yet, with what was sampled for it so far."""

    request: GenerationRequest
    sampling: Sampling
    future: "Future[Completion]"
    added: float
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    losses: int = 0
    is_aborted: bool = False
    resumes: int = 0
    """How often it was paused; each part of the response has noise of its own."""
    replica: int | None = None
    sent: float = 0.0

    def next_request(self, wire_id: int) -> GenerationRequest:
        """What is still to be sampled, under the id of this dispatch."""
        request = self.request
        seed = request.seed if not self.resumes else stream_seed(request.seed, "resume", self.resumes)
        return GenerationRequest(
            row_id=wire_id,
            prompt_ids=(*request.prompt_ids, *self.ids),
            seed=seed,
            max_tokens=request.max_tokens - len(self.ids),
            answer=request.answer,
            prompt_index=request.prompt_index,
        )


@dataclass(slots=True)
class Lane:
    """One replica, and what the servers want of it."""

    replica: Replica
    waiting: deque[int] = field(default_factory=deque)
    """Wire ids to send with the next call."""
    open: set[int] = field(default_factory=set)
    """Wire ids it has, or will get."""
    aborting: set[int] = field(default_factory=set)
    """Wire ids to end with the next call, whether anybody waits for them or not."""
    flights: int = 0
    steps: int = 8
    quiet_calls: int = 0
    """Calls since the last one that brought a new request."""
    is_alive: bool = True
    cause: str = ""
