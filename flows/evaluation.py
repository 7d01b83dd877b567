"""Evaluation of a model on held-out prompts: n samples each, mean, best and majority with intervals, per source.

(checkpoint ->) weight sync -> validation
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Prefect loads this file by path

from prefect import flow

from configs.run import RunConfig
from tasks.runner import pool_runner
from tasks.session import current_session
from tasks.side_run import keep_result, open_side_run
from tasks.validation import validation
from tasks.weights import load_state, weight_sync


@flow(name="evaluation", flow_run_name="{config.name}")
def evaluation(config: RunConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Score `config.model` on `config.validation`, or the actor of a checkpoint's folder."""
    duties = ("rollout", "reward") if checkpoint is None else ("actor", "rollout", "reward")
    with open_side_run(config, duties) as run:
        run.resumed_folder = checkpoint
        return keep_result(run, score_held_out(), checkpoint=checkpoint, model=config.model.path)


@flow(name="held-out", flow_run_name="held-out prompts", task_runner=pool_runner())
def score_held_out() -> Any:
    """The engines on their own weights, or on those of a checkpoint."""
    run, at = current_session(), current_session().stamp()
    loaded = [load_state.submit(at, run.resumed_folder)] if run.needs("actor") else []
    synced = [weight_sync.submit(at, at.policy_version, wait_for=loaded)] if run.needs("actor") else []
    scored = validation.submit(at, at.policy_version, wait_for=synced)
    return run.gather(at, [*loaded, *synced, scored])
