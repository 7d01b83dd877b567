"""PPO and its family: the training flow, and one subflow an iteration.

    rollout -> {reward, reference, actor log-probs, critic values} -> advantage -> {critic update, actor update}
            -> weight sync -> {validation, checkpoint}

Calls and names only: which pool a step runs in, what it reads and what it adds stands with the step.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Prefect loads this file by path

from prefect import flow

from configs.run import RunConfig
from flows.sft import sft
from tasks.actor import actor_log_probs, actor_update
from tasks.advantage import advantage
from tasks.api import confirm_cancelled
from tasks.checkpoint import checkpoint
from tasks.commit import commit, finish
from tasks.critic import critic_update, critic_values
from tasks.prepare import open_run, prepare, warm_up
from tasks.recovery import recovering
from tasks.reference import adapter_reference, reference, refresh_reference
from tasks.reward import reward
from tasks.rollout import data_position, rollout
from tasks.runner import pool_runner
from tasks.samples import samples
from tasks.session import current_session
from tasks.subflow import iteration_run_name
from tasks.teacher import teacher
from tasks.validation import validation
from tasks.weights import load_state, weight_sync


@flow(name="ppo", flow_run_name="{config.name}", on_cancellation=[confirm_cancelled])
def ppo(config: RunConfig, resume: str | None = None) -> dict[str, Any]:
    """Train until `config.iterations` are done. `resume`: the folder of a run to go on with; its own config counts."""
    with open_run(config, resume) as run:
        warm_up(run, sft)
        prepare(run, preparation)
        while not run.is_finished:
            with recovering(run):
                commit(run, run.call(iteration))
        return finish(run)


@flow(name="preparation", flow_run_name="preparation", task_runner=pool_runner())
def preparation() -> Any:
    """Before the first iteration: the newest checkpoint, if any, to its roles; the actor's weights to the engines.

    And whether the data is still what that checkpoint's position is of.
    """
    run, at = current_session(), current_session().stamp()
    loaded = load_state.submit(at, run.resumed_folder)
    synced = weight_sync.submit(at, at.policy_version, wait_for=[loaded])
    scored = [validation.submit(at, at.policy_version, wait_for=[synced])] if run.should_validate_first else []
    position = run.saved_position
    found = [data_position.submit(at, position, wait_for=[synced])] if position is not None else []
    return run.gather(at, [loaded, synced, *scored, *found])


@flow(name="iteration", flow_run_name=iteration_run_name, task_runner=pool_runner())
def iteration(iteration: int, attempt: int) -> Any:
    """One iteration: every step is submitted as its inputs allow, siblings side by side."""
    run, at = current_session(), current_session().stamp()
    batch = run.take_rollout(at) or rollout.submit(at, at.policy_version, run.solved)
    first = run.before_ahead(batch)
    ahead = [rollout.submit(later, at.policy_version, wait_for=first) for later in run.rollouts_ahead(at)]

    scored = [reward.submit(at, batch)]
    scored += [actor_log_probs.submit(at, batch)] if run.recomputes_log_probs else []
    scored += [reference.submit(at, batch)] if run.needs("reference") else []
    scored += [adapter_reference.submit(at, batch)] if run.has_adapter_reference else []
    scored += [teacher.submit(at, batch)] if run.needs("teacher") else []
    scored += [critic_values.submit(at, batch)] if run.needs("critic") else []
    estimated = advantage.submit(at, [batch, *scored])

    everything = [batch, *scored, estimated]
    kept = [samples.submit(at, everything, run.samples_folder)] if run.keeps_samples else []
    updates = [actor_update.submit(at, everything)] if run.trains_actor else []
    updates += [critic_update.submit(at, everything)] if run.needs("critic") else []
    refreshed = (
        [refresh_reference.submit(at, at.policy_version + 1, wait_for=updates)] if run.should_refresh_reference else []
    )
    synced = weight_sync.submit(at, at.policy_version + 1, wait_for=[*updates, *run.before_sync(ahead)])

    tail = [validation.submit(at, at.policy_version + 1, wait_for=[synced])] if run.should_validate else []
    tail += [checkpoint.submit(at, run.staging_folder(), wait_for=[synced, *refreshed])] if run.should_save else []
    return run.gather(at, [batch, *scored, estimated, *kept, *updates, *refreshed, synced, *tail], ahead)
