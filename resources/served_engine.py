"""The servers behind the interface of an engine: a rollout worker, or an agent loop, uses them as it uses its own."""

import queue
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from resources.engines.base import (
    FinishReason,
    GenerationFacts,
    GenerationOutput,
    GenerationRequest,
    OnFinished,
    Sampling,
    WeightReport,
    Weights,
)
from resources.requests_on_the_way import Completion, RequestLostError
from resources.rollout_servers import RolloutServers
from resources.telemetry.rollout_gauge import response_length_facts

STEP_SECONDS = 5.0
"""A step gives what has finished; with nothing finished it returns after this long at most."""


class ServedEngine:
    """Sampling goes to the servers; weights go to the replicas by themselves."""

    def __init__(self, servers: RolloutServers) -> None:
        self.servers = servers
        self.policy_version = 0
        self.facts = GenerationFacts()
        self.token_versions: dict[int, list[int]] = {}
        """Row id -> version of each token sampled for it, of all its turns; `forget` empties it."""
        self.lost: dict[int, str] = {}
        """Row id -> why no replica could answer it; such a row ends with ABORT and no token."""
        self._redispatches = 0
        self._open: dict[int, Future[Completion]] = {}
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_finished: OnFinished | None = None
    ) -> list[GenerationOutput]:
        """Sample all requests; the answers come in request order."""
        started = time.monotonic()
        outputs: dict[int, GenerationOutput] = {}
        self._watch(requests, self.servers.submit_all(requests, sampling))
        while self.has_unfinished():
            finished = self.step()
            outputs |= {output.row_id: output for output in finished}
            if finished and on_finished is not None:
                on_finished(finished)
        seconds = time.monotonic() - started
        lengths = [len(output.token_ids) for output in outputs.values()]
        self.facts = GenerationFacts(tokens=sum(lengths), seconds=seconds)
        rate = sum(lengths) / max(seconds, 1e-9)
        self.facts.span = {**response_length_facts(lengths), "tokens": sum(lengths), "tokens_per_second": rate}
        return [outputs[request.row_id] for request in requests]

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Queue one response."""
        self._watch([request], [self.servers.submit(request, sampling)])

    def _watch(self, requests: Sequence[GenerationRequest], futures: "Sequence[Future[Completion]]") -> None:
        for request, future in zip(requests, futures, strict=True):
            self._open[request.row_id] = future
            future.add_done_callback(self._teller(request.row_id))

    def _teller(self, row_id: int) -> "Callable[[Future[Completion]], None]":
        return lambda future: self._done.put(row_id)

    def step(self) -> list[GenerationOutput]:
        """What has finished since the last call; waits for the first. Raises ValueError as an engine does."""
        finished: list[GenerationOutput] = []
        try:
            finished.append(self._take(self._done.get(timeout=STEP_SECONDS)))
            while True:
                finished.append(self._take(self._done.get_nowait()))
        except queue.Empty:
            return finished

    def has_unfinished(self) -> bool:
        """Whether any response is on its way."""
        return bool(self._open)

    def abort(self, row_ids: Collection[int] | None = None) -> list[GenerationOutput]:
        """End responses, keeping what was sampled."""
        wanted = list(self._open) if row_ids is None else [row for row in row_ids if row in self._open]
        self.servers.abort(wanted)
        outputs: list[GenerationOutput] = []
        while any(row in self._open for row in wanted):
            outputs += self.step()
        return outputs

    def _take(self, row_id: int) -> GenerationOutput:
        future = self._open.pop(row_id)
        try:
            answer = future.result(timeout=0)
        except RequestLostError as error:
            self.lost[row_id] = str(error)
            self.token_versions.setdefault(row_id, [])  # of an episode, those of the turns before
            return GenerationOutput(row_id=row_id, token_ids=(), log_probs=(), finish_reason=FinishReason.ABORT)
        self.token_versions.setdefault(row_id, []).extend(answer.versions)
        return GenerationOutput(
            row_id=row_id,
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            finish_reason=answer.finish_reason,
            finish_seconds=answer.seconds,
        )

    def versions_of(self, row_id: int) -> list[int]:
        """The version of each token sampled for a row; none for one that was lost."""
        return self.token_versions.get(row_id, [])

    def new_redispatches(self) -> int:
        """Requests sent to another replica since the last call."""
        before, self._redispatches = self._redispatches, self.servers.redispatches
        return self._redispatches - before

    def forget(self) -> None:
        """Empty what is kept of finished rows."""
        self.token_versions.clear()
        self.lost.clear()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Nothing: the replicas answer their own probes."""
        return []

    def begin_update(self) -> None:
        """Refused: weights go to the replicas."""
        raise RuntimeError("weights are loaded by the replicas, not through the servers")

    def load_weights(self, weights: Weights) -> None:
        """Refused, see `begin_update`."""
        self.begin_update()

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Refused, see `begin_update`."""
        raise RuntimeError("weights are loaded by the replicas, not through the servers")

    def sleep(self) -> None:
        """The replicas do that themselves."""

    def wake(self) -> None:
        """The replicas do that themselves."""

    def shutdown(self) -> None:
        """Close the servers."""
        self.servers.close()
