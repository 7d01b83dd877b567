"""What an iteration leaves behind: metrics, spans, the new state, and a published checkpoint where one is due.

The order makes a kill at any point harmless: the metrics line is on the disk before the checkpoint that counts its
bytes is published, and a resume cuts the file to what the newest checkpoint counts.
"""

import time
from pathlib import Path
from typing import Any

from resources.curriculum import curriculum_after
from resources.telemetry.live import IterationView, view_iteration
from tasks.artifacts import Sample
from tasks.outcome import Outcome
from tasks.recovery import keep_snapshot
from tasks.run_state import next_kl_coef
from tasks.session import Session, manifest_of
from tasks.watchers import Progress


def commit(run: Session, outcome: Outcome) -> None:
    """Make the iteration part of the run."""
    at = outcome.at
    run.state = run.state.after(
        position=outcome.facts["rollout"]["next_position"],
        kl_coef=next_kl_coef(run.config, at.kl_coef, outcome.metrics),
        parts={
            **{name: facts["state"] for name, facts in outcome.facts.items() if "state" in facts},
            **curriculum_after(run.state.parts, outcome.facts),
        },
    )
    view = _view(outcome)
    line = {
        "iteration": at.iteration,
        "actor/kl_coef": at.kl_coef,
        **outcome.metrics,
        **(view.metrics() if view is not None else {}),
        "time/iteration": run.lap(),
        "recovery/attempt": at.attempt,
    }
    run.directory.append(run.directory.metrics, line)
    run.spans.append(*outcome.spans, outcome.span)
    run.history.append(line)
    run.keep_ahead(outcome.ahead)
    staged = outcome.facts.get("checkpoint", {}).get("folder")
    if staged is not None:
        _publish(run, Path(staged), outcome.metrics)
    run.attempt = 1
    run.hosts.drop(at.batch_id)
    keep_snapshot(run)
    run.verdict = view.verdict.line if view is not None else None
    run.report(
        Progress(
            iteration=at.iteration,
            iterations=run.config.iterations,
            metrics=line,
            spans=outcome.spans,
            view=view,
            samples=[
                Sample(**sample, iteration=at.iteration) for sample in outcome.facts.get("samples", {}).get("samples", ())
            ],
            subflow_id=outcome.flow_run_id,
        )
    )


def _view(outcome: Outcome) -> IterationView | None:
    """The iteration attributed and judged; None when its spans went with a host that died after its last step."""
    return view_iteration(outcome.spans, outcome.span) if outcome.spans else None


def finish(run: Session) -> dict[str, Any]:
    """The summary of the run, as `callsheet train --json` prints it."""
    first, last = run.validations()
    metrics = run.history[-1] if run.history else {}
    return {
        "run": str(run.directory.path),
        "iterations": run.state.iteration,
        "seconds": round(time.monotonic() - run.started, 3),
        "accuracy_before": first.get("validation/accuracy"),
        "accuracy_after": last.get("validation/accuracy"),
        "sampled_accuracy_before": first.get("validation/sampled_accuracy"),
        "sampled_accuracy_after": last.get("validation/sampled_accuracy"),
        "explained_variance": metrics.get("critic/explained_variance"),
        "kl_to_reference": metrics.get("actor/reference_kl"),
        "verdict": run.verdict,
    }


def _publish(run: Session, staging: Path, metrics: dict[str, float]) -> None:
    settings = run.config.checkpoint
    run.checkpoints.commit(staging, manifest_of(run, metrics))
    best = run.checkpoints.best(settings.keep_best) if settings.keep_best else None
    run.checkpoints.prune(settings.keep, {best} if best is not None else ())
    run.directory.event("checkpoint", iteration=run.state.iteration)
