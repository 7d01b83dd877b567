"""A call on its way to the ranks of a group."""

import time
from typing import Any

import ray
from ray.exceptions import RayError

from resources.call_plan import join_answers
from resources.diagnosis import Watched, diagnose
from resources.dispatch import MethodInfo, Topology
from resources.worker_process import TIMES


class PendingCall:
    """A call on its way."""

    def __init__(
        self,
        processes: Watched,
        topology: Topology,
        method: MethodInfo,
        sent: list[Any],
        answering: list[bool],
        submitted: float,
        seconds: float,
    ) -> None:
        self._processes = processes
        self._topology = topology
        self._method = method
        self._data = [pair[1] for pair in sent] if method.marking.bulk else []
        self._refs = [pair[0] for pair in sent] if method.marking.bulk else sent
        self._answering = answering
        self._submitted = submitted
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._replies: list[Any] | None = None

    def is_done(self) -> bool:
        """Whether every rank has answered or failed."""
        done, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)
        return len(done) == len(self._refs)

    def result(self) -> Any:
        """The joined answers; waits until the call's deadline. Raises WorkerFailed or CallTimeout."""
        replies = self._wait()
        if self._method.marking.bulk:
            answers: list[Any] = list(zip(replies, self._data, strict=True))
        else:
            answers = [None if isinstance(reply, bytes) else reply[2] for reply in replies]
        answers = [answer for answer, counts in zip(answers, self._answering, strict=True) if counts]
        return join_answers(self._method, self._topology, answers)

    @property
    def spans(self) -> list[dict[str, float]]:
        """Per called rank: queue_seconds, execute_seconds, start and end on the controller's monotonic clock.

        So it is for every kind of group: what a step hears of its ranks needs no correction.
        """
        spans: list[dict[str, float]] = []
        for rank, reply in enumerate(self._wait()):
            if self._method.marking.bulk:
                spans.append(reply["span"])
                continue
            start, end = TIMES.unpack(reply) if isinstance(reply, bytes) else reply[:2]
            queued = max(0.0, start - self._submitted)
            spans.append(
                {"rank": rank, "queue_seconds": queued, "execute_seconds": end - start, "start": start, "end": end}
            )
        return spans

    def _wait(self) -> list[Any]:
        if self._replies is None:
            try:
                self._replies = ray.get(self._refs, timeout=max(0.0, self._deadline - time.monotonic()))
            except RayError as error:
                refs = dict(enumerate(self._refs))
                name = self._method.name
                raise diagnose(self._processes, refs, error, self._topology.role, name, self._seconds) from None
        return self._replies
