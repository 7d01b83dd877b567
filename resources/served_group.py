"""The rollout role as one group where its engines are servers: sampling goes through these, weights to each engine.

It stands where a worker group stands. The prompts are read, and the rows made, in the process that samples: the task
host of the rollout pool. Other processes only send weights, and never start the servers.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from configs.run import RunConfig
from resources.engines.base import Sampling
from resources.local_group import LocalGroup
from resources.replicas import GroupReplica
from resources.rollout_servers import RolloutServers
from resources.seeding import stream_seed
from resources.worker_group import WorkerGroup

if TYPE_CHECKING:
    from resources.client_episodes import ClientEpisodes
    from resources.openai_endpoint import OpenAiEndpoint

FRONT = ("sample", "evaluate", "describe_prompts", "resume_position")
"""Methods that the front answers: those that read prompts."""


class ServedGroup:
    """See the module."""

    role = name = "rollout"
    failure = None

    def __init__(self, config: RunConfig, groups: Mapping[str, WorkerGroup]) -> None:
        """`groups`: the replicas, by name."""
        self._config = config
        self._groups: Sequence[WorkerGroup] = [groups[name] for name in sorted(groups, key=_number)]
        self._front: LocalGroup | None = None
        self._servers: RolloutServers | None = None
        self._endpoint: OpenAiEndpoint | None = None
        self._clients: ClientEpisodes | None = None
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        """One call at a time, as in a worker's process; its requests are what goes on side by side."""
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="rollout-front")

    @property
    def world_size(self) -> int:
        """Ranks of all replicas together."""
        return sum(group.world_size for group in self._groups)

    @property
    def pool(self) -> str:
        """Of the rollout role."""
        return self._groups[0].pool

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Of all replicas, numbered on."""
        every = [rank for group in self._groups for rank in group.ranks]
        return [{**rank, "rank": place} for place, rank in enumerate(every)]

    @property
    def servers(self) -> RolloutServers:
        """Started with the first use in this process."""
        with self._lock:
            if self._servers is None:
                settings = self._config.rollout.servers
                seconds = self._config.recovery.call_deadline_seconds
                self._servers = RolloutServers(
                    [GroupReplica(group, seconds) for group in self._groups],
                    deadline_seconds=settings.request_deadline_seconds,
                    max_redispatches=settings.max_redispatches,
                    stuck_seconds=self._config.rollout.stuck_response_seconds,
                )
            return self._servers

    @property
    def answered(self) -> float:
        """When a replica last answered in this process, by its monotonic clock; 0 before the first time."""
        return 0.0 if self._servers is None else self._servers.answered

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        return self.submit(method, *args, timeout=timeout, **kwargs).result()

    def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See `WorkerGroup.submit`."""
        if method in FRONT:
            asked = self._threads.submit(self._ask_front, method, args, kwargs)
            return _FrontCall(asked, timeout, self._groups[0].clock_offset)
        return _EveryCall([group.submit(method, *args, timeout=timeout, **kwargs) for group in self._groups])

    def _ask_front(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        front = self._front_worker()
        worker: Any = front.workers[0]
        with self._in_turn:
            versions = {version for group in self._groups for version in group.call("engine_version")}
            # While an update goes on they differ, and what is asked now is sampled after it.
            if len(versions) != 1 and not self._config.rollout.servers.updates_while_sampling:
                raise RuntimeError(f"the engines hold policy versions {sorted(versions)}; sync the weights first")
            worker.engine.policy_version = min(versions)
            call = front.submit(method, *args, **kwargs)
        return call.result(), call.spans

    def _front_worker(self) -> LocalGroup:
        servers = self.servers
        with self._lock:
            if self._front is None:
                from resources.served_engine import ServedEngine
                from resources.workers.rollout import RolloutWorker

                config = self._config
                front = RolloutWorker(
                    config.rollout,
                    config.model,
                    config.data,
                    config.seed,
                    validation=config.validation,
                    engine=ServedEngine(servers),
                )
                self._open_endpoint(servers, front.eos_token_ids)
                front.clients = self._clients
                self._front = LocalGroup("rollout", [front])
            return self._front

    def _open_endpoint(self, servers: RolloutServers, eos_token_ids: Collection[int]) -> None:
        """Where the config asks for it: the OpenAI endpoint, and the program that plays through it."""
        rollout, data = self._config.rollout, self._config.data
        settings = rollout.servers
        if settings.openai_port is None and settings.agent is None:
            return
        from resources.client_episodes import ClientEpisodes
        from resources.models.causal_lm import load_tokenizer
        from resources.openai_endpoint import OpenAiEndpoint, Terms

        sampling = Sampling.from_config(rollout.sampling, eos_token_ids)
        seed = stream_seed(self._config.seed + rollout.seed_offset, "visitors of the endpoint")
        self._endpoint = OpenAiEndpoint(
            servers,
            load_tokenizer(self._config.model),  # its own: tokenizers are not shared between threads
            Terms(seed=seed, sampling=sampling, max_tokens=rollout.max_response_length),
            max_model_length=rollout.max_model_length or data.max_prompt_length + rollout.max_response_length,
            port=settings.openai_port or 0,
        )
        if settings.agent is not None:
            self._clients = ClientEpisodes(
                self._endpoint, settings.agent, processes=settings.agent_processes, seconds=settings.agent_seconds
            )

    def pause(self, timeout: float) -> None:
        """Stop sampling, if this process samples; see `RolloutServers.pause`."""
        if self._servers is not None:
            self._servers.pause(timeout)

    def resume(self) -> None:
        """Undo `pause`."""
        if self._servers is not None:
            self._servers.resume()

    def shutdown(self) -> None:
        """Close the servers and what hangs on them; the replicas are ended by whoever started them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for one in (self._clients, self._endpoint, self._servers):
            if one is not None:
                one.close()


class _FrontCall:
    """A call on the front, whose rows go into the object store."""

    def __init__(self, future: "Future[tuple[Any, list[Any]]]", timeout: float | None, clock_offset: float) -> None:
        """`clock_offset`: the controller's clock less this process's, in which the front works."""
        self._future, self._timeout, self._offset = future, timeout, clock_offset
        self._stored: list[Any] | None = None

    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        answers, _ = self._future.result(timeout=self._timeout)
        if self._stored is None:
            is_bulk = isinstance(answers, list) and bool(answers) and isinstance(answers[0], tuple)
            is_bulk = is_bulk and isinstance(answers[0][0], dict)
            # Without Ray the whole cast is in this process, and rows stay where they are.
            store = ray.put if ray.is_initialized() else _as_it_is
            self._stored = [(status, store(data)) for status, data in answers] if is_bulk else answers
        return self._stored

    @property
    def spans(self) -> list[dict[str, float]]:
        own = self._future.result(timeout=self._timeout)[1]
        return [{**span, "start": span["start"] + self._offset, "end": span["end"] + self._offset} for span in own]


class _EveryCall:
    """The same call on every replica, joined in their order."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    def is_done(self) -> bool:
        return all(call.is_done() for call in self._calls)

    def result(self) -> list[Any]:
        return [answer for call in self._calls for answer in call.result()]

    @property
    def spans(self) -> list[dict[str, float]]:
        every = [span for call in self._calls for span in call.spans]
        return [{**span, "rank": place} for place, span in enumerate(every)]


def _as_it_is(value: Any) -> Any:
    return value


def _number(name: str) -> int:
    return int(name.partition(".")[2])


def replicas_of(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The groups named `rollout.N`."""
    return {name: group for name, group in groups.items() if name.startswith("rollout.")}
