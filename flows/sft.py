"""Supervised fitting on the actor's pool: the warm-up of a run, the same alone, and a reward model from pairs.

demonstrations -> actor fit -> publish          preferences -> reward model fit -> publish
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
from tasks.supervised import (
    actor_fit,
    demonstrations,
    preferences,
    publish_model,
    publish_reward_model,
    reward_model_fit,
)


@flow(name="sft", flow_run_name="warm-up", task_runner=pool_runner())
def sft() -> Any:
    """Fit the actor to the data's own answers for `sft.steps` optimizer steps and publish it as a model folder."""
    run = current_session()
    at = run.warm_up_stamp()
    rows = demonstrations.submit(at)
    fitted = actor_fit.submit(at, rows, run.warm_up_steps)
    published = publish_model.submit(at, str(run.warm_model_folder), wait_for=[fitted])
    return run.gather(at, [rows, fitted, published])


@flow(name="reward-model", flow_run_name="reward model", task_runner=pool_runner())
def reward_model() -> Any:
    """Fit a reward model to preference pairs for `sft.steps` optimizer steps and publish it as a model folder."""
    run = current_session()
    at = run.warm_up_stamp()
    rows = preferences.submit(at)
    fitted = reward_model_fit.submit(at, rows, run.warm_up_steps)
    published = publish_reward_model.submit(at, str(run.warm_model_folder), wait_for=[fitted])
    return run.gather(at, [rows, fitted, published])


@flow(name="supervised", flow_run_name="{config.name}")
def supervised(config: RunConfig) -> dict[str, Any]:
    """Fit alone what `sft.objective` names; the model lies in the run's folder, under `model`."""
    assert config.sft is not None, "callsheet sft checks it"
    is_pairs = config.sft.objective == "reward_model"
    duties = ("reward_trainer", "preferences") if is_pairs else ("actor", "demonstrations")
    with open_side_run(config, duties, fits=True) as run:
        outcome = reward_model() if is_pairs else sft()
        return keep_result(run, outcome, model=str(run.warm_model_folder), objective=config.sft.objective)
