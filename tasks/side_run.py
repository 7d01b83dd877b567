"""Runs that are no training loop, supervised fitting alone and evaluation: a part of the cast, a subflow, a result."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.layout import ProcessGroup, process_groups
from configs.run import RunConfig
from resources.casting import OF_GRADERS, Casting, all_duties, distinct_groups, duties_of, start_process_group
from resources.run_directory import SIDE_RUN, STARTED, RunDirectory
from resources.worker_group import WorkerGroup
from tasks.api import check_from_nodes
from tasks.outcome import Outcome
from tasks.run_folder import run_folder
from tasks.session import Session, open_session
from tasks.start_check import check_start

RESULT = "result.json"


@contextlib.contextmanager
def open_side_run(config: RunConfig, duties: Sequence[str], *, fits: bool = False) -> Iterator[Session]:
    """A new run folder with workers for `duties` alone; with `fits` the actor has the optimizer that `sft` names.

    Raises ConfigError for what the config asks that cannot be, and what `open_session` raises.
    """
    check_start(config, trains=False, fits=fits)
    with run_folder(config, None) as (config, directory):
        directory.event(SIDE_RUN, duties=sorted(duties))
        with open_session(config, directory) as run:
            check_from_nodes()
            directory.event(STARTED)
            run.groups = start_duties(run, duties, fits=fits)
            try:
                run.hosts.attach(run.groups)
                yield run
            finally:
                for group in distinct_groups(run.groups):
                    group.shutdown()


def start_duties(run: Session, duties: Sequence[str], *, fits: bool = False) -> dict[str, WorkerGroup]:
    """Worker groups of some duties, where the config places them; what only reads data sits with the actor."""
    casting: Casting = run.casting()
    if fits and run.config.sft is not None:
        actor = run.config.actor.model_copy(update={"optimizer": run.config.sft.optimizer})
        casting = replace(casting, config=run.config.model_copy(update={"actor": actor}))
    started: dict[str, WorkerGroup] = {}
    for group in process_groups(run.config):
        mine = duties_in(run.config, group, duties)
        if mine:
            started |= start_process_group(run.cluster, casting, group, mine)
    return started


def duties_in(config: RunConfig, group: ProcessGroup, duties: Sequence[str]) -> list[str]:
    """What the processes of `group` do where only `duties` are asked for: those placed there, and what those need.

    Rollouts need the environments, graders the models that they ask.
    """
    needed = {"rollout": ("env",), "reward": tuple(OF_GRADERS)}
    wanted = {*duties, *(other for duty in duties for other in needed.get(duty, ()))}
    mine = [duty for duty in all_duties(config, group) if duty.partition(".")[0] in wanted]
    if "actor" in duties_of(group):
        mine += [duty for duty in duties if duty in ("demonstrations", "preferences", "reward_trainer")]
        mine.sort(key=lambda duty: duty in ("demonstrations", "preferences"))
    return mine


def free_name(runs: Path, name: str) -> str:
    """`name`, or the first of `name`-2, `name`-3, ... that no run has."""
    if not (runs / name).exists():
        return name
    number = 2
    while (runs / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


def keep_result(run: Session, outcome: Outcome, **facts: Any) -> dict[str, Any]:
    """Write the metrics of a side run to its folder, and give them with the facts."""
    result = {
        "run": str(run.directory.path),
        "seconds": round(time.monotonic() - run.started, 3),
        **facts,
        "metrics": dict(outcome.metrics),
    }
    run.record(*outcome.spans, outcome.span)
    write_result(run.directory, result)
    return result


def write_result(directory: RunDirectory, result: Mapping[str, Any]) -> None:
    """RUN_DIR/result.json."""
    (directory.path / RESULT).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
