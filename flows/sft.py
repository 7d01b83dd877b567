"""Supervised warm-up: demonstrations -> actor fit -> publish, on the actor's pool. Its model is where PPO starts."""

from typing import Any

from prefect import flow

from tasks.runner import PoolTaskRunner
from tasks.session import current_session
from tasks.supervised import actor_fit, demonstrations, publish_model


@flow(name="sft", flow_run_name="warm-up", task_runner=PoolTaskRunner())
def sft() -> Any:
    """Fit the actor to the data's own answers for `sft.steps` optimizer steps and publish it as a model folder."""
    run = current_session()
    at = run.warm_up_stamp()
    rows = demonstrations.submit(at)
    fitted = actor_fit.submit(at, rows, run.warm_up_steps)
    published = publish_model.submit(at, str(run.warm_model_folder), wait_for=[fitted])
    return run.gather(at, [rows, fitted, published])
