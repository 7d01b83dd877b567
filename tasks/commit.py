"""What an iteration leaves behind: metrics, spans, the new state, and a published checkpoint where one is due.

The order makes a kill at any point harmless: the metrics line is on the disk before the checkpoint that counts its
bytes is published, and a resume cuts the file to what the newest checkpoint counts. Ctrl-C waits until it is done.
"""

import time
from dataclasses import replace
from typing import Any

from prefect.logging import get_logger

from resources.curriculum import curriculum_after
from resources.run_summary import summarise
from resources.signals import held_signals
from resources.telemetry.live import IterationView, view_iteration
from tasks.artifacts import Sample
from tasks.outcome import Outcome
from tasks.policies import check_nan_policy
from tasks.recovery import keep_snapshot
from tasks.run_state import next_kl_coef
from tasks.saves import WAIT_SECONDS, begin_save, make_room, publish_finished, publish_staged
from tasks.session import Session
from tasks.watchers import Progress


def commit(run: Session, outcome: Outcome) -> None:
    """Make the iteration part of the run: its lines and the snapshot of its state, or neither."""
    with held_signals():
        _commit(run, outcome)


def _commit(run: Session, outcome: Outcome) -> None:
    at = outcome.at
    make_room(run, outcome.facts.get("checkpoint"))
    nan_steps = check_nan_policy(run.config.recovery, run.directory, run.state, outcome.metrics)
    run.state = run.state.after(
        position=outcome.facts["rollout"]["next_position"],
        kl_coef=next_kl_coef(run.config, at.kl_coef, outcome.metrics),
        parts={
            **{name: facts["state"] for name, facts in outcome.facts.items() if "state" in facts},
            **curriculum_after(run.state.parts, outcome.facts),
        },
    )
    run.state = replace(run.state, nan_steps=nan_steps)
    view = _view(run, outcome)
    line = {
        "iteration": at.iteration,
        "actor/kl_coef": at.kl_coef,
        **outcome.metrics,
        **(view.metrics() if view is not None else {}),
        "time/iteration": run.lap(),
        "recovery/attempt": at.attempt,
        "recovery/count": run.recoveries,
        "recovery/failed_saves": run.failed_saves,
    }
    run.directory.append(run.directory.metrics, line)
    run.record(*outcome.spans, outcome.span)
    if "problem" in outcome.facts.get("samples", {}):
        reason = outcome.facts["samples"]["problem"]
        run.directory.event("samples-failed", iteration=at.iteration, reason=reason)
        get_logger("callsheet").error(
            "the rows of iteration %d were NOT kept (%s); the run goes on", at.iteration, reason
        )
    run.keep_ahead(outcome.ahead)
    run.hosts.drop(at.batch_id)
    _keep(run, outcome)
    run.recoveries_in_a_row = 0
    run.verdict = view.verdict.line if view is not None else None
    run.report(
        Progress(
            iteration=at.iteration,
            iterations=run.config.iterations,
            metrics=line,
            spans=outcome.spans,
            view=view,
            samples=[
                Sample(**sample, iteration=at.iteration)
                for sample in outcome.facts.get("samples", {}).get("samples", ())
            ],
            subflow_id=outcome.flow_run_id,
        )
    )


def _view(run: Session, outcome: Outcome) -> IterationView | None:
    """The iteration attributed and judged; None without telemetry, or when its spans went with a host that died."""
    is_wanted = run.config.telemetry.enabled and outcome.spans
    return view_iteration(outcome.spans, outcome.span, refused=run.refused_changes) if is_wanted else None


def finish(run: Session) -> dict[str, Any]:
    """The summary of the run, as `callsheet train --json` prints it; first, the last checkpoint is on the disk."""
    publish_finished(run, WAIT_SECONDS)
    seconds = time.monotonic() - run.started
    return summarise(run.directory.path, run.state.iteration, seconds, run.verdict, run.first_validation)


def _keep(run: Session, outcome: Outcome) -> None:
    """Snapshot in memory, and the checkpoint on disk where one is due."""
    staged = outcome.facts.get("checkpoint")
    is_beside = staged is None and run.is_save_due(run.state.iteration)
    keep_snapshot(run, outcome.metrics, is_forced=is_beside)
    if staged is not None:
        publish_staged(run, staged, outcome.metrics)
    elif is_beside and run.snapshot is not None:
        begin_save(run, run.snapshot, outcome.metrics)
    else:
        publish_finished(run)
