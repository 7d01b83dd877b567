"""Step two of recovery: whatever is dead comes back under a new incarnation; whatever lives stays as it is."""

import time

import ray

from configs.layout import process_groups
from resources.casting import distinct_groups, start_process_group
from resources.placement import NoFit, fit
from tasks.hosts import HostLostError
from tasks.session import DoesNotFitError, Session, first_bundle

DRAIN_SECONDS = 30.0
"""Steps of the failed iteration that still run get this long; then the groups they wait for are restarted."""
PING_SECONDS = 10.0


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
                run.suspects.add(group.name)
    run.inflight = []


def rebuild(run: Session) -> list[str]:
    """Restart dead groups and hosts; pools that lost a node are reserved anew. Returns the names of what came back."""
    gone = _pools_without_their_nodes(run)
    rebuilt = [f"pool {pool}" for pool in sorted(gone)]
    if gone:
        _move(run, gone)
    for group in distinct_groups(run.groups):
        if group.pool not in gone and (group.failure is not None or group.name in run.suspects):
            group.restart()
            rebuilt.append(f"group {group.name}")
    for pool in run.hosts.pools:
        if pool in gone or pool in run.lost_hosts or not _answers(run, pool):
            run.hosts.restart(pool)
            rebuilt.append(f"task host {pool}")
    run.suspects.clear()
    run.lost_hosts.clear()
    run.hosts.attach(run.groups)
    return rebuilt


def _pools_without_their_nodes(run: Session) -> set[str]:
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {
        name
        for name in run.config.pools
        if any(bundle.place.node_id not in alive for bundle in run.cluster.pools[name].bundles)
    }


def _move(run: Session, pools: set[str]) -> None:
    """Cast the roles of `pools` onto the nodes that are left. Raises DoesNotFitError when they are too few."""
    for group in distinct_groups(run.groups):
        if group.pool in pools:
            group.shutdown()
    for pool in sorted(pools):
        run.cluster.pools.release_pool(pool)
    placement = fit(run.config, run.cluster.inventory())
    if isinstance(placement, NoFit):
        raise DoesNotFitError(
            f"after a node was lost the plan no longer fits; the run can be resumed on more nodes\n{placement}"
        )
    pins = {name: nodes for name, nodes in placement.pins().items() if name in pools}
    configs = {name: run.config.pools[name] for name in sorted(pools)}
    run.cluster.reserve(configs, run.config.ray.placement_deadline_seconds, pins)
    casting = run.casting()
    for planned in process_groups(run.config):
        if planned.pool in pools:
            run.groups |= start_process_group(run.cluster, casting, planned)
    run.hosts.place({pool: first_bundle(run.cluster, pool) for pool in pools})


def _answers(run: Session, pool: str) -> bool:
    try:
        ray.get(run.hosts.host_of(pool).facts.remote(), timeout=PING_SECONDS)
    except (ray.exceptions.RayError, HostLostError):
        return False
    return True


def _has_ended(ref: object) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
