"""The controller's side of the task hosts: start one per pool, find the host of a step, rebuild and end them."""

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import ray
from prefect.settings.context import get_current_settings
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from configs.layout import advantage_pool, duties
from configs.run import RunConfig
from resources.telemetry.clocks import ClockOffset, RoundTrip, estimate_offset
from tasks.host import MAX_CONCURRENT_STEPS, TaskHost
from tasks.step import Step, readers_of

START_DEADLINE_SECONDS = 120.0
"""A host imports Prefect (1-2 s, more on a busy machine) and opens a client."""
CALL_DEADLINE_SECONDS = 30.0
"""For calls that only look something up in a host."""
CLOCK_ROUND_TRIPS = 5
HOST_SETTINGS = ("PREFECT_API", "PREFECT_CLIENT", "PREFECT_EVENTS", "PREFECT_LOGGING", "PREFECT_CLOUD", "PREFECT_TASKS")
"""Settings a host needs; the rest (paths, profiles, the server's own) belongs to the controller's machine."""


def worker_env(extra: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Ray runtime_env of a task host: the controller's Prefect settings, which may be in no environment variable.

    Without an API URL in its environment a host would start a server of its own and its rows would vanish.
    """
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    env = {key: str(value) for key, value in settings.items() if key.startswith(HOST_SETTINGS)}
    env |= {
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",  # a line per task would double the rows in the database
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    }
    return {"env_vars": env | dict(extra or {})}


def pools_of_roles(config: RunConfig) -> dict[str, str]:
    """Duty -> pool; advantage goes to the actor's pool unless it has a role of its own."""
    table = {duty: config.roles[role].pool for duty, role in duties(config).items()}
    return table | {"advantage": advantage_pool(config)}


class HostLostError(RuntimeError):
    """A pool's task host died: pool, step and Ray's reason. What its table held is gone; the iteration runs again."""


class HostSet:
    """The task hosts of a run, by pool."""

    def __init__(
        self,
        *,
        run_id: str,
        role_pools: Mapping[str, str],
        steps: Iterable[Step],
        placements: Mapping[str, Any] | None = None,
        config: Any = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`role_pools`: duty -> pool. `placements`: pool -> Ray scheduling strategy of its bundle 0.

        Raises ValueError when a step's role stands in no pool: at the start of the flow, not as a task that waits.
        """
        self.run_id = run_id
        self.role_pools = dict(role_pools)
        self.steps = tuple(steps)
        self._placements = dict(placements or {})
        self._config = config
        self._env = dict(env or {})
        self._hosts: dict[str, ActorHandle[Any]] = {}
        self._incarnations: dict[str, int] = {}
        self._clock_offsets: dict[str, ClockOffset] = {}
        self._groups: dict[str, Any] = {}
        for one in self.steps:
            self.pool_of(one)

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.role_pools.values())))

    def pool_of(self, task: Any) -> str:
        """Pool whose host runs `task`. Raises ValueError for a task without a role, or of a role without a pool."""
        if not isinstance(task, Step):
            raise ValueError(f"task {task.name!r} has no role, so no pool; declare it with @step(role=...)")
        if task.role not in self.role_pools:
            raise ValueError(
                f"step {task.name!r} has role {task.role!r}, which stands in no pool; roles are"
                f" {sorted(self.role_pools)}. Add roles.{task.role}.pool"
            )
        return self.role_pools[task.role]

    def host_of(self, pool: str) -> "ActorHandle[Any]":
        if pool not in self._hosts:
            raise HostLostError(f"pool {pool!r} has no task host; hosts are in {sorted(self._hosts)}")
        return self._hosts[pool]

    def start(self, deadline_seconds: float = START_DEADLINE_SECONDS) -> dict[str, dict[str, Any]]:
        """Make a host in every pool and wait until all answer; returns their facts by pool.

        Raises TimeoutError naming the pools whose host did not come up.
        """
        for pool in self.pools:
            self._make(pool)
        facts = self._ask("facts", deadline_seconds)
        for host in self._hosts.values():
            host.connect.remote(self._hosts)
        for pool in self.pools:
            self.clock_offset(pool)
        return facts

    def restart(self, pools: Collection[str], deadline_seconds: float = START_DEADLINE_SECONDS) -> None:
        """Replace the hosts of `pools` under their next incarnation numbers; their tables are empty afterwards.

        All of them before any is called: one that comes back cannot be made known to another that is still dead.
        Raises TimeoutError naming the pools whose host did not come up, HostLostError when one died meanwhile.
        """
        for pool in pools:
            old = self._hosts.pop(pool, None)
            if old is not None:
                ray.kill(old)
        for pool in pools:
            self._make(pool)
        self._ask("facts", deadline_seconds)
        self._ask("connect", deadline_seconds, self._hosts)
        self._ask("attach", deadline_seconds, self._groups)
        for pool in pools:
            self.clock_offset(pool)

    def attach(self, groups: Mapping[str, Any]) -> None:
        """Give every host these worker groups (by duty) for those it had; call again after a group was rebuilt."""
        self._groups = dict(groups)
        self._ask("attach", CALL_DEADLINE_SECONDS, self._groups)

    def place(self, placements: Mapping[str, Any]) -> None:
        """New placements of pools that were moved; they count from the next `restart` on."""
        self._placements.update(placements)

    def reconfigure(self, config: Any) -> None:
        """Another config; a host gets it with its next `restart`."""
        self._config = config

    def drop(self, batch_id: str) -> None:
        """Forget a batch in every pool: it is finished, or its iteration failed."""
        self._ask("drop", CALL_DEADLINE_SECONDS, batch_id)

    def batch_ids(self) -> dict[str, tuple[str, ...]]:
        """Batches each pool's table still holds."""
        return self._ask("batch_ids", CALL_DEADLINE_SECONDS)

    def quiet_seconds(self) -> float:
        """Seconds since a step got an answer of a worker group, in whichever host that was last."""
        return min(self._ask("quiet_seconds", CALL_DEADLINE_SECONDS).values())

    def clock_offset(self, pool: str) -> ClockOffset:
        """Of the pool's host against this process, measured once a host: the next one may stand on another node.

        Raises HostLostError when there is no host, or it died meanwhile.
        """
        if pool not in self._clock_offsets:
            host, trips = self.host_of(pool), []
            for _ in range(CLOCK_ROUND_TRIPS):
                sent = time.monotonic()
                try:
                    remote: Any = ray.get(host.clock.remote(), timeout=CALL_DEADLINE_SECONDS)
                except RayActorError as error:
                    raise HostLostError(f"the task host of pool {pool!r} died: {_reason(error)}") from error
                trips.append(RoundTrip(sent=sent, remote=remote, received=time.monotonic()))
            self._clock_offsets[pool] = estimate_offset(trips)
        return self._clock_offsets[pool]

    def num_cores(self) -> int:
        """Cores of the largest node that has a host: Ray's count may be a declared one."""
        return max(int(facts["cores"]) for facts in self._ask("facts", CALL_DEADLINE_SECONDS).values())

    def shutdown(self, flush_seconds: float = 10.0) -> None:
        """Let the hosts send their last events, then end them. A host that does not answer is ended all the same."""
        sending: list[Any] = [host.flush.remote() for host in self._hosts.values()]
        if sending:
            ray.wait(sending, num_returns=len(sending), timeout=flush_seconds)
        for host in self._hosts.values():
            ray.kill(host)
        self._hosts.clear()

    def _make(self, pool: str) -> None:
        number = self._incarnations.get(pool, 0) + 1
        self._incarnations[pool] = number
        self._clock_offsets.pop(pool, None)
        options: dict[str, Any] = {
            "name": f"{self.run_id}/{pool}/host-{number}",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": worker_env(self._env),
        }
        if self._placements.get(pool) is not None:
            options["scheduling_strategy"] = self._placements[pool]
        readers = readers_of(self.steps)
        decorate: Any = ray.remote  # Ray's stubs do not know concurrency_groups
        actor_class = decorate(concurrency_groups={"steps": MAX_CONCURRENT_STEPS, "table": 2})(TaskHost)
        self._hosts[pool] = actor_class.options(**options).remote(pool, self.run_id, self._config, readers, number)

    def _ask(self, method: str, timeout: float, *args: Any) -> dict[str, Any]:
        asked = {getattr(host, method).remote(*args): pool for pool, host in self._hosts.items()}
        done, pending = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        if pending:
            late = sorted(asked[ref] for ref in pending)
            raise TimeoutError(f"task hosts of pools {late} did not answer {method!r} within {timeout:g} s")
        answers = {}
        for ref in done:
            try:
                answers[asked[ref]] = ray.get(ref)
            except RayActorError as error:
                raise HostLostError(f"the task host of pool {asked[ref]!r} died: {_reason(error)}") from error
        return answers


def _reason(error: RayError) -> str:
    return str(error).strip().replace("\n", " ")[:500]


@contextlib.contextmanager
def start_hosts(**settings: Any) -> Iterator[HostSet]:
    """`HostSet(**settings)`, started, used by the flows that run inside the block, and ended after it."""
    from tasks.runner import bind_hosts

    hosts = HostSet(**settings)
    try:
        hosts.start()
        with bind_hosts(hosts):
            yield hosts
    finally:
        hosts.shutdown()
