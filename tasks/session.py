"""A run in progress: its folder, its cluster, its cast and where it stands. Lives in the controller, the flow process.

The controller alone owns placement groups, worker groups and task hosts; flows call it by name and touch no tensor.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefect import Flow
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.changes import refused_changes
from configs.run import RunConfig
from resources.casting import Casting, cast_groups, distinct_groups, stateful_duties
from resources.checkpoints import CheckpointStore
from resources.cluster import Cluster, ClusterError
from resources.failures import WorkerFailed
from resources.import_paths import add_import_paths
from resources.local_cluster import local_cpus
from resources.placement import NoFit, fit
from resources.placement_groups import PoolError
from resources.run_directory import RunDirectory, RunDirectoryError
from resources.snapshot_writer import SnapshotWriters
from resources.telemetry.recorder import SpanFile
from resources.worker_group import WorkerGroup
from tasks.agenda import FIRST_VALIDATION, Agenda
from tasks.arithmetic import tell_slow_arithmetic
from tasks.hosts import HostSet, pools_of_roles
from tasks.outcome import Outcome, Submitted, gather
from tasks.rollout import data_position
from tasks.runner import StepFuture, bind_hosts
from tasks.snapshots import Snapshot
from tasks.stamp import Stamp
from tasks.step import StepResult
from tasks.steps import STEPS
from tasks.subflow import call_iteration, call_subflow
from tasks.watchers import Progress, Watcher

if TYPE_CHECKING:
    from tasks.saves import PendingSave

_CURRENT: list["Session"] = []
PATIENCE = 1.5
"""Deadlines of a call that a subflow may go on without progress: a call that is overdue is told first, by its name."""


class DoesNotFitError(ValueError):
    """The plan does not fit the live cluster; the text is preflight's table."""


REFUSALS = (DoesNotFitError, ClusterError, PoolError, RunDirectoryError)
"""What ends a run before anything of it has started."""


class Session(Agenda):
    """See `open_session`."""

    def __init__(self, config: RunConfig, directory: RunDirectory, cluster: Cluster, hosts: HostSet) -> None:
        super().__init__(config, directory)
        self.cluster = cluster
        self.hosts = hosts
        self.checkpoints = CheckpointStore(directory.checkpoints)
        self.spans = SpanFile(directory.spans)
        self.started = time.monotonic()
        self.resumed_folder: str | None = None
        """Checkpoint that the stateful roles load before the first iteration."""
        self.preparation: Flow[Any, Any] | None = None
        self.is_cast = False
        """Whether the roles of the config have been started; a warm-up before has workers of its own."""
        self.verdict: str | None = None
        self.refused_changes = refused_changes(config)
        """What a verdict does not advise here; tried once, since the config stays."""
        self.watchers: list[Watcher] = []
        self.check_cancelled: Callable[[], None] = lambda: None
        self.snapshot: Snapshot | None = None
        self.spare: Snapshot | None = None
        """An older one that is on two nodes, until the newest is."""
        self.recoveries = 0
        self.recoveries_in_a_row = 0
        """Recoveries since the last iteration that went well."""
        self.saves: list[PendingSave] = []
        """Checkpoints that are being written beside the run."""
        self.failed_saves = 0
        self.writers = SnapshotWriters(directory.run_id, cluster.worker_env)
        cluster.adopt(self.writers)
        self.preparations = 0
        self.inflight: list[StepFuture] = []
        """Steps of the subflow that runs, or of the one that failed."""
        self.suspects: set[str] = set()
        self.lost_hosts: set[str] = set()
        self._lap = time.monotonic()
        self._iteration_ended: float | None = None
        """When the last subflow's steps were over, in this process: the next step begins there."""
        self._ahead: dict[int, StepResult] = {}

    # --- the cast -------------------------------------------------------------------------------------------------

    def casting(self) -> Casting:
        """What workers are made from."""
        from tasks.graders_of import build_graders

        return Casting(config=self.config, model=self.model, graders=tuple(build_graders(self.config)))

    def cast(self) -> None:
        """Start every worker group and give the task hosts their handles."""
        self.groups = cast_groups(self.cluster, self.casting())
        self.is_cast = True
        self.hosts.attach(self.groups)

    @property
    def stateful_groups(self) -> dict[str, WorkerGroup]:
        """Duty -> group of the roles whose state is saved and restored."""
        return {duty: self.groups[duty] for duty in stateful_duties(self.config) if duty in self.groups}

    # --- iterations -----------------------------------------------------------------------------------------------

    def call(self, flow: Flow[Any, Any]) -> Outcome:
        """Run the iteration's subflow; an API outage before its body starts is waited out.

        Raises WorkerFailed before it begins when a process that was idle has died: what would be sampled were lost.
        """
        for group in distinct_groups(self.groups):
            if group.failure is not None:
                raise WorkerFailed(group.failure)
        return call_iteration(
            flow,
            iteration=self.state.iteration,
            attempt=self.attempt,
            outage_seconds=self.config.recovery.prefect_outage_seconds,
        )

    def synchronise(self) -> None:
        """Bring roles and engines to the run's state: load `resumed_folder` if set, then sync weights."""
        if self.preparation is None:
            raise RuntimeError("the run was not prepared; flows/ppo.py does it before its first iteration")
        self.preparations += 1
        outcome = call_subflow(
            self.preparation,
            iteration=self.state.iteration,
            attempt=self.preparations,
            outage_seconds=self.config.recovery.prefect_outage_seconds,
        )
        self.resumed_folder = None
        if data_position.name in outcome.facts:
            self.take_position(outcome.facts[data_position.name])
        for group in self.stateful_groups.values():  # last of all: an engine that loads may draw from the same stream
            group.call("restore_random")
        scored = {name: value for name, value in outcome.metrics.items() if name.startswith("validation/")}
        if scored and not self.first_validation:
            self.state = replace(self.state, parts={**self.state.parts, FIRST_VALIDATION: scored})
        self.lap()

    def gather(self, at: Stamp, submitted: Sequence[Submitted], ahead: Sequence[StepFuture] = ()) -> Outcome:
        """Wait for the steps of a subflow; see `tasks.outcome.gather`.

        Every call has a deadline of its own; this wait ends where nothing was answered for longer than one may take.
        """
        deadline = PATIENCE * self.config.recovery.call_deadline_seconds
        self.inflight = [*(one for one in submitted if isinstance(one, StepFuture)), *ahead]
        since, self._iteration_ended = self._iteration_ended, None
        outcome = gather(
            at,
            submitted,
            ahead,
            since=since,
            deadline_seconds=deadline,
            check=self._look,
            quiet_seconds=self.hosts.quiet_seconds,
        )
        self._iteration_ended = outcome.span.ended
        return outcome

    def _look(self) -> None:
        """What is looked after while steps run."""
        self.check_cancelled()
        if self.spare is not None and self.snapshot is not None and self.snapshot.is_copied:
            self.spare = None

    def staging_folder(self) -> str:
        """Where the next checkpoint is written before it is published."""
        return str(self.checkpoints.begin(self.state.iteration + 1))

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        seconds, self._lap = now - self._lap, now
        return seconds

    def record(self, *spans: Any) -> None:
        """Write to spans.jsonl, unless `telemetry.enabled` is false."""
        if self.config.telemetry.enabled:
            self.spans.append(*spans)

    def report(self, progress: Progress) -> None:
        """Tell whoever watches (the UI, the console, sinks) of a committed iteration."""
        for watcher in self.watchers:
            watcher(progress)

    # --- rollouts ahead -------------------------------------------------------------------------------------------

    def take_rollout(self, at: Stamp) -> StepResult | None:
        """The rollout of this iteration, if an earlier one sampled it ahead."""
        return self._ahead.pop(at.iteration, None)

    def rollouts_ahead(self, at: Stamp) -> list[Stamp]:
        """Iterations up to `async_depth` ahead whose rollout is still to be submitted."""
        last = min(at.iteration + self.config.async_depth, self.config.iterations - 1)
        later = [number for number in range(at.iteration + 1, last + 1) if number not in self._ahead]
        # As the iteration itself will be stamped; should it fail in between, it samples afresh (`forget_ahead`).
        return [
            replace(
                at,
                iteration=number,
                attempt=self.failed_attempts[number] + 1,
                start=at.start + (number - at.iteration) * at.count,
            )
            for number in later
        ]

    def before_ahead(self, batch: StepFuture | StepResult) -> Sequence[StepFuture]:
        """What rollouts ahead wait for: the iteration's own, where it is still to be sampled.

        They share the engines, and its update needs that one first.
        """
        return [batch] if isinstance(batch, StepFuture) else []

    def before_sync(self, ahead: Sequence[StepFuture]) -> Sequence[StepFuture]:
        """Rollouts ahead that the weight sync waits for: none where servers take new weights while they sample."""
        return () if self.config.rollout.servers.updates_while_sampling else ahead

    def keep_ahead(self, results: Sequence[StepResult]) -> None:
        """Remember rollouts sampled for later iterations, in the order `rollouts_ahead` named them."""
        first = self.state.iteration + len(self._ahead)
        self._ahead |= {first + offset: result for offset, result in enumerate(results)}

    def forget_ahead(self) -> None:
        """Rollouts sampled ahead came from weights that a rollback took back."""
        self._ahead.clear()


def current_session() -> Session:
    """The session of the flow that runs in this process. Raises RuntimeError where there is none."""
    if not _CURRENT:
        raise RuntimeError("no run is open in this process; the iteration flow is called by the training flow")
    return _CURRENT[-1]


@contextlib.contextmanager
def open_session(config: RunConfig, directory: RunDirectory) -> Iterator[Session]:
    """Check the plan against the live cluster, reserve the pools, start the task hosts.

    Leaving the block, by any door, leaves nothing of the run on the cluster.

    Raises:
        DoesNotFitError: with preflight's table, before any placement group.
        ClusterError, PoolError, WorkerFailed: as they come up.
    """
    paths = add_import_paths(config.code.import_paths)
    with Cluster(
        directory.run_id,
        address=config.ray.address,
        connect_seconds=config.ray.connect_deadline_seconds,
        run_dir=directory.path,
        num_cpus=local_cpus(config),
        num_gpus=config.ray.num_gpus,
        object_store_bytes=config.ray.object_store_bytes,
        worker_env=paths,
        stopped_after_seconds=config.recovery.stopped_after_seconds,
    ) as cluster:
        placement = fit(config, cluster.inventory())
        if isinstance(placement, NoFit):
            raise DoesNotFitError(str(placement))
        cluster.reserve(config.pools, config.ray.placement_deadline_seconds, placement.pins())
        role_pools = pools_of_roles(config)
        hosts = HostSet(
            run_id=directory.run_id,
            role_pools=role_pools,
            steps=[one for one in STEPS if one.role in role_pools],
            placements={name: first_bundle(cluster, name) for name in config.pools},
            config=config,
            env=paths,
        )
        session = Session(config, directory, cluster, hosts)
        try:
            facts = hosts.start()
            tell_slow_arithmetic(config, directory, facts)
            with bind_hosts(hosts):
                _CURRENT.append(session)
                yield session
        finally:
            if session in _CURRENT:
                _CURRENT.remove(session)
            hosts.shutdown()


def first_bundle(cluster: Cluster, pool: str) -> PlacementGroupSchedulingStrategy:
    """Bundle 0 of a pool, where its task host lives; the host asks for no CPU of it."""
    first = cluster.pools[pool].bundles[0]
    return PlacementGroupSchedulingStrategy(first.group, placement_group_bundle_index=first.place.bundle_index)
