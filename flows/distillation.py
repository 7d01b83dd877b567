"""On-policy distillation: the training flow, and one subflow an iteration.

    rollout -> {teachers, reward, reference, actor log-probs} -> advantage -> actor update -> weight sync
            -> {validation, checkpoint}

The student samples, teachers score its own samples, each those of its data sources. The reward step only measures
unless `distillation.task_reward_weight` gives it a part. To add a teacher to another algorithm use flows/ppo.py.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Prefect loads this file by path

from prefect import flow

from configs.run import RunConfig
from flows.ppo import preparation
from flows.sft import sft
from tasks.actor import actor_log_probs, actor_update
from tasks.advantage import advantage
from tasks.api import confirm_cancelled
from tasks.checkpoint import checkpoint
from tasks.commit import commit, finish
from tasks.prepare import open_run, prepare, warm_up
from tasks.recovery import recovering
from tasks.reference import adapter_reference, reference, refresh_reference
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.runner import pool_runner
from tasks.samples import samples
from tasks.session import current_session
from tasks.subflow import iteration_run_name
from tasks.teacher import teacher
from tasks.validation import validation
from tasks.weights import weight_sync


@flow(name="distillation", flow_run_name="{config.name}", on_cancellation=[confirm_cancelled])
def distillation(config: RunConfig, resume: str | None = None) -> dict[str, Any]:
    """Teach until `config.iterations` are done. `resume`: the folder of a run to go on with; its own config counts."""
    with open_run(config, resume) as run:
        warm_up(run, sft)
        prepare(run, preparation)
        while not run.is_finished:
            with recovering(run):
                commit(run, run.call(lesson))
        return finish(run)


@flow(name="iteration", flow_run_name=iteration_run_name, task_runner=pool_runner())
def lesson(iteration: int, attempt: int) -> Any:
    """One iteration."""
    run, at = current_session(), current_session().stamp()
    batch = run.take_rollout(at) or rollout.submit(at, at.policy_version, run.solved)
    first = run.before_ahead(batch)
    ahead = [rollout.submit(later, at.policy_version, wait_for=first) for later in run.rollouts_ahead(at)]

    scored = [teacher.submit(at, batch), reward.submit(at, batch), actor_log_probs.submit(at, batch)]
    scored += [reference.submit(at, batch)] if run.needs("reference") else []
    scored += [adapter_reference.submit(at, batch)] if run.has_adapter_reference else []
    estimated = advantage.submit(at, [batch, *scored])
    everything = [batch, *scored, estimated]
    kept = [samples.submit(at, everything, run.samples_folder)] if run.keeps_samples else []
    updated = actor_update.submit(at, everything)
    refreshed = (
        [refresh_reference.submit(at, at.policy_version + 1, wait_for=[updated])]
        if run.should_refresh_reference
        else []
    )
    synced = weight_sync.submit(at, at.policy_version + 1, wait_for=[updated, *run.before_sync(ahead)])

    tail = [validation.submit(at, at.policy_version + 1, wait_for=[synced])] if run.should_validate else []
    tail += [checkpoint.submit(at, run.staging_folder(), wait_for=[synced, *refreshed])] if run.should_save else []
    return run.gather(at, [*everything, *kept, updated, *refreshed, synced, *tail], ahead)
