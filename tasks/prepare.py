"""Opening a run: its folder, its cluster, its cast, and the state it starts from."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.runtime import flow_run
from prefect.states import Crashed

from configs.layout import num_workers, placed, process_groups, styles
from configs.run import RunConfig
from resources.bundle_memory import least_accelerator_bytes
from resources.casting import Casting, duties_of, start_process_group
from resources.frozen_heap import frozen_heap
from resources.import_paths import add_import_paths
from resources.inventory import live_nodes
from resources.run_directory import STARTED, RunDirectory, is_run_folder, read_lines
from resources.samples import cut_samples
from resources.telemetry.spans import PoolRecord, RunRecord
from tasks.api import CancelWatch, check_from_nodes, quick_retries
from tasks.host_watch import HostWatch
from tasks.hosts import pools_of_roles
from tasks.manifests import tell_other_config
from tasks.recovery import keep_snapshot, recovering, repeating, restore_reward_state
from tasks.resume_check import check_resume
from tasks.run_folder import run_folder
from tasks.run_state import RunState
from tasks.saves import save_last_iteration
from tasks.session import Session, open_session
from tasks.start_check import check_start
from tasks.watchers import open_watchers


@contextlib.contextmanager
def open_run(config: RunConfig, resume: str | None) -> Iterator[Session]:
    """A new run, or the one in the folder `resume`; everything of it is gone from the cluster afterwards."""
    left = _folder_to_resume(config, resume)
    if left is None:
        check_before(config, None)
    with run_folder(config, left) as (config, directory):
        if left is not None:
            check_before(config, left)
        with open_session(config, directory) as run:
            check_from_nodes()
            with (
                quick_retries(),
                CancelWatch(flow_run.id) as watch,
                HostWatch(run.hosts, run.writers, config.recovery.stopped_after_seconds),
                open_watchers(config, directory.run_id, directory.path) as watchers,
            ):
                run.check_cancelled = watch.check
                run.watchers = watchers
                _restore_state(run)
                with frozen_heap(), _last_iteration_saved(run):
                    yield run


def check_before(config: RunConfig, resumed: Path | None) -> None:
    """What this config reads and calls, looked at before anything is started. Raises ConfigError.

    Of a run that goes on it is the config stored in `resumed`.
    """
    add_import_paths(config.code.import_paths)  # in them lies what is imported below
    if resumed is None:
        check_start(config)
    else:
        check_resume(resumed)
    if config.teachers:
        from resources.teachers import check_teachers  # loads tokenizers, and so torch

        check_teachers(config)
    if config.rollout.servers.agent is not None:
        from resources.client_episodes import check_agent  # loads the engines' side

        check_agent(config)


def _folder_to_resume(config: RunConfig, resume: str | None) -> Path | None:
    """The folder named; or, when Prefect runs a flow run again, the folder that its first try has left.

    A folder of that name which another flow run made is another run's: it was refused, and is refused again.
    """
    if resume is not None:
        return Path(resume)
    left = Path(config.run_dir) / config.name
    is_again = (flow_run.run_count or 1) > 1 and is_run_folder(left)
    return left if is_again and RunDirectory(left).is_made_by(str(flow_run.id)) else None


@contextlib.contextmanager
def _last_iteration_saved(run: Session) -> Iterator[None]:
    """A run that is stopped, by a person or by what it cannot repair, leaves its newest snapshot on the disk."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            save_last_iteration(run)


def _restore_state(run: Session) -> None:
    """Start from the newest whole checkpoint, if there is one; later lines of metrics and spans go."""
    newest, problems = run.checkpoints.latest(run.directory.metrics)
    for problem in problems:
        run.directory.event("checkpoint-ignored", problem=problem)
        get_logger("callsheet").warning("checkpoint ignored: %s", problem)
    if newest is not None:
        run.state = RunState.from_json(newest.state).under(run.config)
        run.resumed_folder = str(run.checkpoints.path_of(newest.iteration))
        tell_other_config(run.directory, run.config, newest)
    run.directory.cut(run.directory.metrics, newest.metrics_bytes if newest is not None else 0)
    run.directory.cut_after(run.directory.spans, run.state.iteration)
    cut_samples(run.directory.samples, run.state.iteration)
    _close_flow_run_before(run)
    run.directory.event(
        "resumed" if newest is not None else STARTED, iteration=run.state.iteration, flow_run=str(flow_run.id)
    )


def _close_flow_run_before(run: Session) -> None:
    """A controller that was killed left its flow run `Running` for ever; it is told what happened."""
    ids = [line["flow_run"] for line in read_lines(run.directory.events) if line.get("flow_run")]
    if not ids or ids[-1] == str(flow_run.id):
        return
    with get_client(sync_client=True) as client:
        try:
            before = client.read_flow_run(UUID(ids[-1]))
            if before.state is not None and not before.state.is_final():
                client.set_flow_run_state(
                    before.id, Crashed(message="its process ended; resumed by another"), force=True
                )
        except ObjectNotFound:
            return  # another server, or pruned


def warm_up(run: Session, flow: Flow[Any, Any]) -> None:
    """Run the supervised warm-up once in the life of a run, with its own workers on the actor's pool.

    It has no state to roll back to: when a process dies it begins again.
    """
    while run.needs_warm_up:
        with repeating(run):
            _warm_up_once(run, flow)


def _warm_up_once(run: Session, flow: Flow[Any, Any]) -> None:
    place = next(group for group in process_groups(run.config) if "actor" in duties_of(group))
    groups = start_process_group(run.cluster, _warm_up_casting(run), place, ["actor", "demonstrations"])
    try:
        run.hosts.attach(groups)
        flow()
    finally:
        next(iter(groups.values())).shutdown()


def _warm_up_casting(run: Session) -> Casting:
    """The cast of the warm-up: the actor with the optimizer that `sft` names."""
    casting, sft = run.casting(), run.config.sft
    if sft is None:
        return casting
    actor = run.config.actor.model_copy(update={"optimizer": sft.optimizer})
    return replace(casting, config=run.config.model_copy(update={"actor": actor}))


def prepare(run: Session, flow: Flow[Any, Any]) -> None:
    """Start the cast and bring it to the run's state; a process that dies meanwhile is replaced like any other."""
    if run.is_finished:
        return
    run.cast()
    run.record(_run_record(run))
    run.preparation = flow
    is_ready = False
    while not is_ready:
        with recovering(run):
            if run.snapshot is None:  # else a recovery has prepared everything already
                restore_reward_state(run)
                run.synchronise()
                keep_snapshot(run, {}, is_forced=run.config.recovery.enabled)
            is_ready = True


def _run_record(run: Session) -> RunRecord:
    """What the report and the what-if need to know of the hardware and the batch."""
    config = run.config
    roles = pools_of_roles(config)
    tensor_parallel = placed(config, "rollout").tensor_parallel
    return RunRecord(
        run=run.directory.run_id,
        cores_per_node=float(run.hosts.num_cores()),
        accelerator_bytes=_accelerator_bytes(run),
        pools={
            name: PoolRecord(
                ranks=pool.size, accelerator=pool.accelerator, nodes=len(run.cluster.pools[name].node_counts)
            )
            for name, pool in config.pools.items()
        },
        roles=roles,
        colocate=styles(config),
        prompts_per_iteration=config.data.prompts_per_iteration,
        group_size=config.rollout.group_size,
        max_running_sequences=config.rollout.max_running_sequences,
        async_depth=config.async_depth,
        rollout_engines=num_workers(config, "rollout") // tensor_parallel,
        rollout_tensor_parallel=tensor_parallel,
        refused=run.refused_changes,
    )


def _accelerator_bytes(run: Session) -> int:
    """Memory of the smallest accelerator bundle as the cluster tells it; 0 where it does not."""
    if all(pool.accelerator == "none" for pool in run.config.pools.values()):
        return 0
    live, pools = {node.node_id: node for node in live_nodes()}, run.cluster.pools
    nodes_of = {name: [live.get(one.place.node_id) for one in pools[name].bundles] for name in run.config.pools}
    return least_accelerator_bytes(run.config.pools, nodes_of)
