"""The processes of one or several colocated roles: started in parallel, watched, released and rebuilt together."""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from resources.cleanup import CONTROLLER_KEY
from resources.diagnosis import await_evidence, diagnose
from resources.dispatch import MethodInfo, marked_methods
from resources.failures import Failure, GroupFacts, RankFacts
from resources.import_paths import import_class
from resources.node_resources import ray_name
from resources.pools import Claim, ResourcePool, round_down
from resources.process_facts import host_identity
from resources.ranks import check_distinct_devices, check_user_env, device_env, memory_env, rank_env
from resources.ray_state import actor_id_of, is_actor_dead
from resources.registry import drop_card
from resources.worker_process import AsyncWorkerProcess, RoleSetup, Seat, WorkerProcess
from resources.worker_spec import Home, WorkerSpec

_RELEASE_SECONDS = 1.0
_GONE_SECONDS = 10.0


class Processes:
    """One process per bundle of a pool, each hosting the given roles. The process that made them owns them."""

    clock_offset = 0.0

    def __init__(
        self,
        home: Home,
        pool: ResourcePool,
        name: str,
        specs: Sequence[WorkerSpec],
        share: float = 1.0,
        bundles: Sequence[int] | None = None,
    ) -> None:
        """Checks everything that can be checked without a process, and claims the bundles; `start` makes the processes.

        Raises ValueError for a reserved env key, a class that does not import or a method marked wrongly, and PoolError
        for what does not fit on the bundles. `bundles` is rank -> bundle of the pool; left out, a rank per bundle.
        """
        self.home = home
        self.pool = pool
        self.name = name
        self.specs = tuple(specs)
        self.bundles = list(range(pool.size) if bundles is None else bundles)
        self.places = pool.ranks(self.bundles)
        self.incarnation = 0
        self.actors: list[ActorHandle] = []
        self.views: list[Any] = []
        """The worker groups (one per role) that speak through these processes."""
        self.start_skew_seconds = 0.0
        self._failure: Failure | None = None
        self.methods: dict[str, dict[str, MethodInfo]] = {}
        for spec in self.specs:
            check_user_env(spec.role, spec.env)
            worker_class = import_class(spec.worker) if isinstance(spec.worker, str) else spec.worker
            self.methods[spec.role] = marked_methods(worker_class)
            spec.mesh.dp_size(len(self.bundles))
        self.claim = self._claim(share)
        self.facts = self._planned_facts()
        pool.claim(name, self.claim, self.bundles)

    @property
    def is_detached(self) -> bool:
        """Whether they outlive the run."""
        return self.pool.config.lifetime == "detached"

    @property
    def failure(self) -> Failure | None:
        """The first failure of this incarnation."""
        return self._failure

    def start(self) -> None:
        """Start all ranks in parallel and construct their workers. On failure nothing is left. Raises WorkerFailed."""
        is_up = False
        try:
            self._launch()
            is_up = True
        finally:
            if not is_up:
                self.stop()

    def restart(self) -> None:
        """End every process and start all of them again, under the next incarnation and with a new store."""
        self._end_processes()
        self._failure = None
        self.pool.give_back(self.name)
        self.pool.claim(self.name, self.claim, self.bundles)
        self.start()

    def stop(self) -> None:
        """End every process and give the bundles back."""
        self._end_processes()
        self.pool.give_back(self.name)
        for view in self.views:
            drop_card("group", self.home.run_id, view.name)

    def release_peers(self, failure: Failure) -> Failure:
        """Make the group unusable: the first failure is kept, and ranks blocked in a collective are ended."""
        self._failure = self.home.supervisor.keep(failure)
        self._kill()
        return self._failure

    def evidence(self, timeout: float) -> Failure | None:
        """What the supervisor knows of a death in this incarnation, waiting a little for it."""
        return await_evidence(lambda: self.home.supervisor.kept(self.name, self.incarnation), timeout)

    def newest_incarnation(self) -> int:
        """The present one; the owner never holds an old handle."""
        return self.incarnation

    def log_tail(self, rank: int) -> list[str]:
        """The last log lines of a rank as its beats told them."""
        return self.home.supervisor.tail(self.name, self.incarnation, rank)

    def running(self) -> list[tuple[str | None, float]]:
        """(running call, seconds since the last beat) per rank."""
        return self.home.supervisor.running(self.name, self.incarnation)

    # --- start ----------------------------------------------------------------------------------------------------

    def _claim(self, share: float) -> Claim:
        fractions = [spec.fraction for spec in self.specs if spec.fraction is not None]
        fraction = sum(fractions) if fractions else share
        cpus = [spec.cpus for spec in self.specs if spec.cpus is not None]
        # A pool of CPUs has no accelerator to share; there only CPUs and slots count.
        has_share = bool(fractions) or ray_name(self.pool.config.accelerator) is not None
        claim = Claim(
            fraction=round_down(fraction) if has_share else 0.0,
            cpus=round_down(sum(cpus) if cpus else self.pool.config.cpus_per_bundle * fraction),
        )
        if claim.fraction < 0 or claim.cpus < 0:
            raise ValueError(
                f"worker group {self.name}: fraction is {fraction:g} and CPUs are {claim.cpus:g}; "
                "a process takes no negative share"
            )
        return claim

    def _planned_facts(self, booted: Sequence[Mapping[str, Any]] | None = None) -> GroupFacts:
        ranks: list[RankFacts] = []
        for place in self.places:
            seen = booted[place.rank] if booted is not None else {}
            log_name = "-".join([*(spec.role for spec in self.specs), str(place.rank)])
            ranks.append(
                RankFacts(
                    rank=place.rank,
                    actor_name=f"{self.name}/{self.incarnation}/{place.rank}",
                    actor_id=str(seen.get("actor_id", "")),
                    node_ip=place.node_ip,
                    node_id=place.node_id,
                    pid=int(seen.get("pid", 0)),
                    raylet_pid=int(seen.get("raylet_pid", 0)),
                    host=str(seen.get("host", "")),
                    log_file=str(self.home.log_dir / f"{log_name}.log"),
                )
            )
        return GroupFacts(
            run_id=self.home.run_id,
            name=self.name,
            pool=self.pool.name,
            roles=tuple(spec.role for spec in self.specs),
            incarnation=self.incarnation,
            ranks=tuple(ranks),
            supervisor=self.home.supervisor.address,
            token=self.home.supervisor.token,
            controller_host=host_identity(),
        )

    def _launch(self) -> None:
        self.incarnation = self.home.supervisor.next_incarnation(self.name)
        self.facts = self._planned_facts()
        deadline = time.monotonic() + max(spec.start_seconds for spec in self.specs)
        for rank in range(len(self.bundles)):
            self.actors.append(self._create(rank))
        booted = self._gather([actor.boot.remote() for actor in self.actors], deadline, "start")
        self.facts = self._planned_facts(booted)
        self._check_devices(booted)
        self.home.supervisor.watch(self.facts, self._on_failure)
        master = self._open_store(deadline)
        setups = ray.put(self._setups())
        environments = [rank_env(place, self.name, master) for place in self.places]
        times = self._gather(
            [actor.construct.remote(env, setups) for actor, env in zip(self.actors, environments, strict=True)],
            deadline,
            "__init__",
        )
        self.start_skew_seconds = max(t["began"] for t in times) - min(t["began"] for t in times)

    def _create(self, rank: int) -> ActorHandle:
        bundle = self.pool.bundles[self.bundles[rank]]
        facts = self.facts.ranks[rank]
        seat = Seat(
            run_id=self.home.run_id,
            group=self.name,
            pool=self.pool.name,
            incarnation=self.incarnation,
            rank=rank,
            supervisor=self.home.supervisor.address,
            token=self.home.supervisor.token,
            log_file=facts.log_file,
            is_detached=self.is_detached,
        )
        has_async = any(method.is_async for methods in self.methods.values() for method in methods.values())
        options: dict[str, Any] = {
            "name": facts.actor_name,
            "namespace": self.home.run_id,
            "num_cpus": self.claim.cpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                bundle.group,
                placement_group_bundle_index=bundle.place.bundle_index,
                placement_group_capture_child_tasks=False,
            ),
            "runtime_env": {"env_vars": self._process_env()},
            **self._accelerator_options(),
        }
        if self.is_detached:
            options["lifetime"] = "detached"
        actor_class: Any = ray.remote(AsyncWorkerProcess if has_async else WorkerProcess)
        return actor_class.options(**options).remote(seat)

    def _accelerator_options(self) -> dict[str, Any]:
        resource, amount = ray_name(self.pool.config.accelerator), self._accelerators
        if resource is None or not amount:
            return {}
        return {"num_gpus": amount} if resource == "GPU" else {"resources": {resource: amount}}

    @property
    def _accelerators(self) -> float:
        """Of a rank, as Ray counts them."""
        if ray_name(self.pool.config.accelerator) is None:
            return 0.0
        return round_down(self.pool.config.accelerators_per_bundle * self.claim.fraction)

    def _process_env(self) -> dict[str, str]:
        """What must stand before Python imports anything; the same for every rank."""
        given = [spec.threads for spec in self.specs if spec.threads is not None]
        threads = str(max(given) if given else max(1, int(self.claim.cpus)))
        env = {**self.home.worker_env, **memory_env(self._accelerators), **device_env(self._accelerators)}
        if self.is_detached:
            env.pop(CONTROLLER_KEY, None)  # It marks what ends with the controller.
        for spec in self.specs:
            env |= spec.env
        threaded = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        # Off at the start, since Ray would import torch for it; the worker turns it on once torch is there.
        zero_copy = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0"}
        return {**env, **threaded, **zero_copy, "CALLSHEET_RUN_ID": self.home.run_id}

    def _check_devices(self, booted: Sequence[Mapping[str, Any]]) -> None:
        if self.claim.fraction >= 1.0 and self.pool.config.accelerators_per_bundle >= 1.0:
            check_distinct_devices(
                (rank, str(seen["node_id"]), device) for rank, seen in enumerate(booted) for device in seen["devices"]
            )

    def _open_store(self, deadline: float) -> tuple[str, int] | None:
        if not any(spec.rendezvous for spec in self.specs):
            return None
        timeout = max(spec.start_seconds for spec in self.specs)
        opened = self.actors[0].open_store.remote(self.facts.ranks[0].node_ip, len(self.bundles), timeout)
        return self._gather([opened], deadline, "rendezvous")[0]

    def _setups(self) -> tuple[RoleSetup, ...]:
        return tuple(
            RoleSetup(
                role=spec.role,
                worker=_by_path(spec.worker),
                args=spec.args,
                kwargs=spec.kwargs,
                methods=tuple(self.methods[spec.role].values()),
            )
            for spec in self.specs
        )

    def _gather(self, refs: list[Any], deadline: float, step: str) -> list[Any]:
        seconds = max(0.0, deadline - time.monotonic())
        try:
            return ray.get(refs, timeout=seconds)
        except RayError as error:
            role = "+".join(self.facts.roles)
            raise diagnose(
                self, dict(enumerate(refs)), error, role, step, max(spec.start_seconds for spec in self.specs)
            ) from None

    # --- end ------------------------------------------------------------------------------------------------------

    def _on_failure(self, failure: Failure) -> None:
        """From the supervisor's thread: a rank died or stopped. Its peers get a moment to say what they saw."""
        if failure.incarnation == self.incarnation:
            self._failure = failure
            actors = list(self.actors)
            self.home.supervisor.call_later(_RELEASE_SECONDS, lambda: _kill_all(actors))

    def _kill(self) -> None:
        _kill_all(self.actors)

    def _end_processes(self) -> None:
        self.home.supervisor.forget(self.facts)
        self._kill()
        deadline = time.monotonic() + _GONE_SECONDS
        left = [actor for actor in self.actors if _is_alive(actor)]
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [actor for actor in left if _is_alive(actor)]
        self.actors = []


def _kill_all(actors: Sequence[ActorHandle]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _is_alive(actor: ActorHandle) -> bool:
    return not is_actor_dead(actor_id_of(actor))


def _by_path(worker: type | str) -> type | str:
    """An importable class by its path, so that its module is imported after the rank's environment is set."""
    if isinstance(worker, str):
        return worker
    module = worker.__module__
    if module == "__main__" or "." in worker.__qualname__:
        return worker
    return _importable(worker) or worker


def _importable(worker: type) -> str | None:
    try:
        found = importlib.util.find_spec(worker.__module__)
    except (ModuleNotFoundError, ValueError):
        return None
    return f"{worker.__module__}:{worker.__qualname__}" if found is not None else None
