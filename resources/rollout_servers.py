"""Rollout servers: engine replicas that take single requests, from rollouts, agents and an HTTP endpoint alike.

Least loaded with prefix affinity; continuous batching; a request whose replica dies or that is stuck goes elsewhere and
is answered once; weights change between two tokens, and every token keeps the version it was sampled with.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from resources.engines.base import FinishReason, GenerationOutput, GenerationRequest, Sampling
from resources.prefix_router import PrefixRouter
from resources.replicas import Replica, ReplicaLost
from resources.request_serving import Orders, Report
from resources.requests_on_the_way import Completion, Lane, PendingRequest, RequestLostError

CALLS_AHEAD = 2
"""Calls on their way to a replica: it never waits for the next one."""
SECONDS_A_CALL = 0.05
"""A call takes as many decode steps as fit; new requests wait for those that are on their way."""
QUIET_CALLS = 4
"""After so many calls that brought nothing new, nobody waits for an answer to ask again: whole calls are cheaper."""
QUIET_LENGTH = 4
"""And so much longer: between two calls an engine stands still for some 3 ms, a twentieth of a short call.

What comes then waits 0.4 s at most, once; the calls behind it are short again."""
MAX_STEPS = 256
REQUESTS_A_CALL = 128
"""The first of many requests are decoded while the others are still on their way."""
POLL_SECONDS = 0.2


class RolloutServers:
    """See the module. Thread-safe; one thread a replica."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        deadline_seconds: float = 120.0,
        max_redispatches: int = 2,
        stuck_seconds: float | None = None,
    ) -> None:
        """`deadline_seconds`: of a whole request. `stuck_seconds`: on one replica, then it is sent to another."""
        self._deadline, self._max_redispatches, self._stuck = deadline_seconds, max_redispatches, stuck_seconds
        self._lanes = {index: Lane(replica=replica) for index, replica in enumerate(replicas)}
        self._router = PrefixRouter()
        self._wire_ids = itertools.count()
        self._wired: dict[int, PendingRequest] = {}
        """Wire id -> request, of requests that a replica has. A new id with every dispatch: what a replica that was
        given up still says is not taken."""
        self._parked: list[PendingRequest] = []
        self._is_paused = self._is_closed = False
        self._changed = threading.Condition()
        self.redispatches = 0
        self.policy_version = 0
        self.answered = 0.0
        """When a replica last answered, by this process's monotonic clock."""
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"server-{lane.replica.name}", daemon=True)
            for index, lane in self._lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    # --- for callers ----------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sampling: Sampling) -> "Future[Completion]":
        """Queue one request. The future raises RequestLostError, or ValueError for a request no engine can answer."""
        return self.submit_all([request], sampling)[0]

    def submit_all(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> "list[Future[Completion]]":
        """Queue requests together: one by one, the first would be decoded alone for the length of a call."""
        now = time.monotonic()
        pending = [PendingRequest(request=one, sampling=sampling, future=Future(), added=now) for one in requests]
        with self._changed:
            if self._is_closed:
                raise RequestLostError("the servers are closed")
            for one in pending:
                self._place(one)
            self._changed.notify_all()
        return [one.future for one in pending]

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """Answer all requests; the answers come in request order."""
        futures = self.submit_all(requests, sampling)
        return [future.result(timeout=self._deadline + 60.0) for future in futures]

    def abort(self, row_ids: Collection[int] | None = None) -> None:
        """End requests (all by default); they are answered with what was sampled, finish reason ABORT."""
        wanted = None if row_ids is None else set(row_ids)
        with self._changed:
            for lane in self._lanes.values():
                for wire in lane.open:
                    if wanted is None or self._wired[wire].request.row_id in wanted:
                        self._wired[wire].is_aborted = True
                        lane.aborting.add(wire)
            for pending in [p for p in self._parked if wanted is None or p.request.row_id in wanted]:
                self._parked.remove(pending)
                self._answer(pending, FinishReason.ABORT, "none")
            self._changed.notify_all()

    def pause(self, timeout: float = 120.0) -> None:
        """Stop sampling: what runs is parked with the tokens it has. Returns when no replica works any more."""
        end = time.monotonic() + timeout
        with self._changed:
            self._is_paused = True
            self._changed.notify_all()
            while any(lane.is_alive and (lane.flights or lane.open) for lane in self._lanes.values()):
                if not self._changed.wait(timeout=min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
                    busy = [lane.replica.name for lane in self._lanes.values() if lane.flights or lane.open]
                    if time.monotonic() > end:
                        raise TimeoutError(f"replicas {busy} did not pause within {timeout:g} s")

    def resume(self) -> None:
        """Go on: parked requests are sampled further, from the tokens they have."""
        with self._changed:
            self._is_paused = False
            parked, self._parked = self._parked, []
            for index in self._lanes:
                self._router.forget(index)  # new weights drop every prefix
            for pending in parked:
                self._place(pending)
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which no token is sampled, for a weight update."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def replace(self, index: int, replica: Replica) -> None:
        """A replica that came back."""
        with self._changed:
            self._lanes[index] = Lane(replica=replica)
            self._router.forget(index)
            thread = threading.Thread(target=self._serve, args=(index,), name=f"server-{replica.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Refuse what comes and fail what is open."""
        with self._changed:
            self._is_closed = True
            for pending in [*self._wired.values(), *self._parked]:
                self._fail(pending, RequestLostError("the servers were closed"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=10.0)
        for lane in self._lanes.values():
            lane.replica.close()

    @property
    def loads(self) -> dict[str, int]:
        """Replica -> open requests."""
        with self._changed:
            return {lane.replica.name: len(lane.open) for lane in self._lanes.values()}

    @property
    def lost(self) -> dict[str, str]:
        """Replica that was lost -> why."""
        with self._changed:
            return {lane.replica.name: lane.cause for lane in self._lanes.values() if not lane.is_alive}

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _place(self, pending: PendingRequest) -> None:
        """Give a request to a replica; one that failed meanwhile (too late) is wanted by nobody."""
        if pending.future.done():
            return
        if self._is_paused:
            self._parked.append(pending)
            return
        loads = {index: len(lane.open) for index, lane in self._lanes.items() if lane.is_alive}
        if pending.replica is not None and len(loads) > 1:
            loads.pop(pending.replica, None)  # it was lost or stuck there
        if not loads:
            causes = "; ".join(lane.cause for lane in self._lanes.values())
            self._fail(pending, RequestLostError(f"request {pending.request.row_id}: no replica is left: {causes}"))
            return
        index = self._router.route([*pending.request.prompt_ids, *pending.ids], loads)
        wire = next(self._wire_ids)
        pending.replica, pending.sent = index, time.monotonic()
        self._wired[wire] = pending
        self._lanes[index].open.add(wire)
        self._lanes[index].waiting.append(wire)

    def _take_back(self, lane: Lane, wire: int) -> PendingRequest:
        lane.open.discard(wire)
        lane.aborting.discard(wire)
        if wire in lane.waiting:
            lane.waiting.remove(wire)
        return self._wired.pop(wire)

    def _again(self, pending: PendingRequest, why: str) -> None:
        """Send it elsewhere, unless that was done too often."""
        pending.losses += 1
        if pending.losses > self._max_redispatches:
            self._fail(
                pending,
                RequestLostError(
                    f"request {pending.request.row_id} was sent {pending.losses} times and lost each time, last "
                    f"because {why}; rollout.servers.max_redispatches is {self._max_redispatches}"
                ),
            )
            return
        self.redispatches += 1
        self._place(pending)

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)

    def _answer(self, pending: PendingRequest, reason: FinishReason, replica: str) -> None:
        if pending.future.done():
            return
        pending.future.set_result(
            Completion(
                row_id=pending.request.row_id,
                token_ids=tuple(pending.ids),
                log_probs=tuple(pending.log_probs),
                versions=tuple(pending.versions),
                finish_reason=reason,
                seconds=time.monotonic() - pending.added,
                replica=replica,
                dispatches=pending.losses + 1,
            )
        )

    # --- one thread a replica -------------------------------------------------------------------------------------

    def _serve(self, index: int) -> None:
        lane = self._lanes[index]
        flights: deque[Callable[[], Report]] = deque()
        try:
            while True:
                orders = self._next_orders(lane, len(flights))
                if orders is not None:
                    flights.append(lane.replica.send(orders))
                if not flights:
                    return
                if orders is None or len(flights) >= CALLS_AHEAD:
                    self._hear(lane, flights.popleft()())
        except ReplicaLost as error:
            self._lose(lane, str(error))
        except BaseException as error:
            self._lose(lane, f"replica {lane.replica.name}: {type(error).__name__}: {error}")
            raise

    def _next_orders(self, lane: Lane, flying: int) -> Orders | None:
        """What to send; None when there is nothing to send now (then the oldest call is heard) or ever."""
        with self._changed:
            lane.flights = flying
            self._changed.notify_all()
            while not self._is_closed:
                self._look_at_clocks(lane)
                orders = self._orders(lane)
                if orders is not None or flying:
                    lane.flights += orders is not None
                    return orders
                self._changed.wait(timeout=POLL_SECONDS)
            return None

    def _orders(self, lane: Lane) -> Orders | None:
        if self._is_paused:
            for wire in list(lane.waiting):
                self._place(self._take_back(lane, wire))
            return Orders(abort=tuple(lane.open), steps=0) if lane.open and not lane.flights else None
        for wire in lane.aborting & set(lane.waiting):
            self._answer(self._take_back(lane, wire), FinishReason.ABORT, lane.replica.name)
        abort = tuple(lane.aborting)
        lane.aborting.clear()
        wires = [lane.waiting.popleft() for _ in range(min(REQUESTS_A_CALL, len(lane.waiting)))]
        add = tuple((self._wired[wire].next_request(wire), self._wired[wire].sampling) for wire in wires)
        lane.quiet_calls = 0 if add else lane.quiet_calls + 1
        if not (lane.open or abort):
            return None
        if lane.quiet_calls < QUIET_CALLS:
            return Orders(add=add, abort=abort, steps=lane.steps)
        steps = min(MAX_STEPS, QUIET_LENGTH * lane.steps)
        return Orders(abort=abort, steps=steps, least_steps=steps)

    def _look_at_clocks(self, lane: Lane) -> None:
        """Requests that took too long fail; those that are stuck here go elsewhere."""
        now = time.monotonic()
        for wire in list(lane.open):
            pending = self._wired[wire]
            if now - pending.added > self._deadline:
                self._fail(pending, RequestLostError(self._late(pending)))
                lane.aborting.add(wire)
            elif self._stuck is not None and now - pending.sent > self._stuck and len(self._alive()) > 1:
                self._take_back(lane, wire)
                lane.aborting.add(wire)
                self._again(pending, f"replica {lane.replica.name} did not finish it within {self._stuck:g} s")
                self._changed.notify_all()

    def _late(self, pending: PendingRequest) -> str:
        return (
            f"request {pending.request.row_id} had no answer within {self._deadline:g} s "
            "(rollout.servers.request_deadline_seconds)"
        )

    def _alive(self) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.is_alive]

    def _hear(self, lane: Lane, report: Report) -> None:
        self.answered = time.monotonic()
        with self._changed:
            self.policy_version = max(self.policy_version, report.version)
            if report.steps and report.seconds > 0.0:
                fitting = int(SECONDS_A_CALL * report.steps / report.seconds)
                lane.steps = min(MAX_STEPS, max(1, (lane.steps + fitting) // 2))
            for wire, why in report.refused:
                if wire in self._wired:
                    self._fail(self._take_back(lane, wire), ValueError(why))
            for output in report.finished:
                if output.row_id in self._wired and output.row_id in lane.open:
                    self._finish(lane, output, report.version)

    def _finish(self, lane: Lane, output: GenerationOutput, version: int) -> None:
        pending = self._take_back(lane, output.row_id)
        if pending.future.done():
            return
        pending.ids += output.token_ids
        pending.log_probs += output.log_probs
        pending.versions += [version] * len(output.token_ids)
        if output.finish_reason is FinishReason.ABORT and not pending.is_aborted:
            if len(pending.ids) < pending.request.max_tokens:
                pending.resumes += 1
                pending.replica = None
                self._parked.append(pending)
                return
            self._answer(pending, FinishReason.LENGTH, lane.replica.name)
            return
        self._answer(pending, output.finish_reason, lane.replica.name)

    def _lose(self, lane: Lane, cause: str) -> None:
        with self._changed:
            lane.is_alive, lane.cause, lane.flights = False, cause, 0
            for wire in list(lane.open):
                self._again(self._take_back(lane, wire), cause)
            self._changed.notify_all()
