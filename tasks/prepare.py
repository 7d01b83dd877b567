"""Opening a run: its folder, its cluster, its cast, and the state it starts from."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.runtime import flow_run

from configs.layout import process_groups
from configs.run import RunConfig
from resources.casting import Casting, start_process_group
from resources.samples import cut_samples
from resources.telemetry.spans import ClockRecord, PoolRecord, RunRecord
from tasks.api import CancelWatch, check_from_nodes
from tasks.hosts import pools_of_roles
from tasks.recovery import keep_snapshot
from tasks.run_state import RunState
from tasks.session import Session, open_directory, open_session
from tasks.watchers import open_watchers


@contextlib.contextmanager
def open_run(config: RunConfig, resume: str | None) -> Iterator[Session]:
    """A new run, or the one in the folder `resume`; everything of it is gone from the cluster afterwards."""
    if config.teachers:
        from resources.teachers import check_teachers  # loads tokenizers, and so torch

        check_teachers(config)
    config, directory = open_directory(config, None if resume is None else Path(resume))
    try:
        with open_session(config, directory) as run:
            check_from_nodes()
            with CancelWatch(flow_run.id) as watch, open_watchers(config, directory.run_id, directory.path) as watchers:
                run.check_cancelled = watch.check
                run.watchers = watchers
                _restore_state(run)
                yield run
    finally:
        directory.release()


def _restore_state(run: Session) -> None:
    """Start from the newest whole checkpoint, if there is one; later lines of metrics and spans go."""
    newest, problems = run.checkpoints.latest()
    for problem in problems:
        run.directory.event("checkpoint-ignored", problem=problem)
    if newest is not None:
        run.state = RunState.from_json(newest.state)
        run.resumed_folder = str(run.checkpoints.path_of(newest.iteration))
    run.directory.cut(run.directory.metrics, newest.metrics_bytes if newest is not None else 0)
    run.directory.cut_after(run.directory.spans, run.state.iteration)
    cut_samples(run.directory.samples, run.state.iteration)
    run.directory.event("resumed" if newest is not None else "started", iteration=run.state.iteration)


def warm_up(run: Session, flow: Flow[Any, Any]) -> None:
    """Run the supervised warm-up once in the life of a run, with its own workers on the actor's pool."""
    if not run.needs_warm_up:
        return
    place = next(group for group in process_groups(run.config) if "actor" in group.roles[0])
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
    """Start the cast and bring it to the run's state."""
    if run.is_finished:
        return
    run.cast()
    run.spans.append(_run_record(run), _clock_record(run))
    run.preparation = flow
    run.synchronise()
    keep_snapshot(run)


def _run_record(run: Session) -> RunRecord:
    """What the report and the what-if need to know of the hardware and the batch."""
    config, nodes = run.config, run.cluster.inventory()
    roles = pools_of_roles(config)
    return RunRecord(
        run=run.directory.run_id,
        cores_per_node=max((node.total.get("CPU", 0.0) for node in nodes), default=0.0),
        pools={
            name: PoolRecord(
                ranks=pool.size, accelerator=pool.accelerator, nodes=len(run.cluster.pools[name].node_counts)
            )
            for name, pool in config.pools.items()
        },
        roles=roles,
        colocate={role: placed.colocate for role, placed in config.roles.items()},
        prompts_per_iteration=config.data.prompts_per_iteration,
        group_size=config.rollout.group_size,
        max_running_sequences=config.rollout.max_running_sequences,
        async_depth=config.async_depth,
    )


def _clock_record(run: Session) -> ClockRecord:
    offsets = run.hosts.clock_offsets()
    return ClockRecord(
        offsets={node: found.seconds for node, found in offsets.items()},
        errors={node: found.error for node, found in offsets.items()},
    )
