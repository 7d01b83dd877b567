"""Step two of recovery: whatever is dead comes back under a new incarnation; whatever lives stays as it is."""

import time
from typing import Any

import ray
import ray.exceptions

from configs.layout import process_groups
from resources.casting import all_duties, check_peers, distinct_groups, start_process_group
from resources.placement_groups import PoolError
from resources.worker_group import WorkerGroup
from tasks.hosts import HostLostError
from tasks.session import Session, first_bundle
from tasks.shrink import shrink

DRAIN_SECONDS = 30.0
"""Steps of the failed iteration that still run get this long; then the groups they wait for are restarted."""
PING_SECONDS = 10.0
EVIDENCE_SECONDS = 3.0
"""After an exception in a living worker, the death it may have come from is looked for this long."""
NODE_SECONDS = 90.0
"""So long where a rank does not beat: Ray gives a node up only when its health checks have failed for a minute."""
SILENT_SECONDS = 5.0


class NoNodesLeftError(RuntimeError):
    """After a node was lost the roles fit nowhere; the run ends and can be resumed on more nodes."""


def drain(run: Session) -> None:
    """Wait until no step of the failed iteration runs any more, so that none writes into the next attempt."""
    pending = [future.wrapped_future for future in run.inflight]
    end = time.monotonic() + DRAIN_SECONDS
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=max(0.0, end - time.monotonic()), fetch_local=False)
    late = {future.pool for future in run.inflight if not _has_ended(future.wrapped_future)}
    for pool in sorted(late):
        run.lost_hosts.add(pool)  # a host with a step that hangs is replaced, and the workers it calls with it
        for group in distinct_groups(run.groups):
            if group.pool == pool:
                run.suspects.add(process_name(group))
    run.inflight = []


def process_name(group: WorkerGroup) -> str:
    """What failures call the group's processes: all fused roles of it."""
    return group.processes.facts.name


def find_deaths(run: Session) -> bool:
    """Whether a process or a node of the run is dead, waiting a little for its supervisor and the cluster to notice.

    While a rank is silent it is waited for longer: a node that lost its power closes no connection, and Ray counts on
    it until its health checks have failed.
    """
    began = time.monotonic()
    while time.monotonic() - began < (NODE_SECONDS if _has_silent_rank(run) else EVIDENCE_SECONDS):
        if any(group.failure is not None and group.failure.is_death for group in distinct_groups(run.groups)):
            return True
        if _pools_without_their_nodes(run):
            return True
        time.sleep(0.1)
    return not all(_answers(run, pool) for pool in run.hosts.pools)


def _has_silent_rank(run: Session) -> bool:
    """Whether a rank of a group that has not failed does not beat: of one that has, the others were ended with it."""
    return any(
        silent >= SILENT_SECONDS
        for group in distinct_groups(run.groups)
        if group.failure is None
        for _, silent in group.processes.running()
    )


def rebuild(run: Session) -> list[str]:
    """Restart dead groups and hosts; pools that lost a node are reserved anew. Returns the names of what came back.

    Whatever a rebuild that was broken off has not started yet is started by the next.
    """
    gone = _pools_without_their_nodes(run)
    rebuilt = [f"pool {pool}" for pool in sorted(gone)]
    if gone:
        _move(run, gone)
    for group in distinct_groups(run.groups):
        is_up = bool(group.processes.actors)  # else a restart of it was broken off
        if group.failure is not None or process_name(group) in run.suspects or not is_up:
            group.restart()
            rebuilt.append(f"group {process_name(group)}")
    rebuilt += [f"group {name}" for name in _start_missing(run)]
    lost = [pool for pool in run.hosts.pools if pool in run.lost_hosts or not _answers(run, pool)]
    if lost:
        run.hosts.restart(lost)
        rebuilt += [f"task host {pool}" for pool in lost]
    run.suspects.clear()
    run.lost_hosts.clear()
    run.hosts.attach(run.groups)
    return rebuilt


def _pools_without_their_nodes(run: Session) -> set[str]:
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {
        name
        for name in run.config.pools
        if name not in run.cluster.pools  # given back, and not reserved again since
        or any(bundle.place.node_id not in alive for bundle in run.cluster.pools[name].bundles)
    }


def _move(run: Session, pools: set[str]) -> None:
    """Reserve `pools` anew on the nodes that are left, smaller where the config allows it; their roles end.

    Raises NoNodesLeftError.
    """
    for group in distinct_groups(run.groups):
        if group.pool in pools:
            group.shutdown()
    for pool in sorted(pools):
        run.cluster.pools.release_pool(pool)
    # All of theirs: of a smaller config some (a replica of the rollout servers) do not come back under their name.
    run.groups = {duty: group for duty, group in run.groups.items() if group.pool not in pools}
    _reserve(run, pools)
    run.hosts.place({pool: first_bundle(run.cluster, pool) for pool in pools})
    run.lost_hosts |= pools


def _start_missing(run: Session) -> list[str]:
    """Start what the config casts and the run does not have. Returns the names of the groups; none before the cast."""
    missing = [
        planned
        for planned in (process_groups(run.config) if run.is_cast else ())
        if run.groups.keys().isdisjoint(all_duties(run.config, planned))
    ]
    for planned in missing:
        run.groups |= start_process_group(run.cluster, run.casting(), planned)
    return [planned.name for planned in missing]


def _reserve(run: Session, pools: set[str]) -> None:
    config = run.config
    while True:
        wanted = {name: config.pools[name] for name in sorted(pools)}
        try:
            run.cluster.reserve(wanted, run.config.ray.placement_deadline_seconds)
            for planned in process_groups(config):
                if planned.pool in pools:
                    check_peers(config, run.cluster.pools[planned.pool], planned)
            break
        except PoolError as error:
            for name in wanted:
                run.cluster.pools.release_pool(name)
            smaller = shrink(config, pools, run.cluster.inventory()) if config.recovery.allow_smaller else None
            if smaller is None:
                raise NoNodesLeftError(
                    f"a node was lost and pools {sorted(pools)} do not fit on those that are left; on more nodes the"
                    f" run can be resumed: callsheet resume {run.directory.path}\n{error}"
                ) from error
            config = smaller
    if config is not run.config:
        run.config = config
        run.hosts.reconfigure(config)
        run.lost_hosts |= set(run.hosts.pools)  # each holds the config it was started with
        run.directory.event("smaller", pools={name: config.pools[name].size for name in sorted(pools)})


def _answers(run: Session, pool: str) -> bool:
    try:
        ray.get(run.hosts.host_of(pool).facts.remote(), timeout=PING_SECONDS)
    except (ray.exceptions.RayError, HostLostError):
        return False
    return True


def _has_ended(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
