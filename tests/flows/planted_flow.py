"""The training flow with a driver that serialises: it hands what it knows of every token to every step by value.

The same steps in the same order as `flows/ppo.py`; the shipped flow passes names and numbers only.
"""

import functools
from typing import Any

from prefect import flow

from configs.run import RunConfig
from flows.ppo import preparation
from tasks.actor import actor_log_probs, actor_update
from tasks.advantage import advantage
from tasks.commit import commit, finish
from tasks.critic import critic_update, critic_values
from tasks.prepare import open_run, prepare
from tasks.recovery import recovering
from tasks.reference import reference
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.runner import pool_runner
from tasks.session import current_session
from tasks.step import Step, step
from tasks.subflow import iteration_run_name
from tasks.weights import weight_sync

NUM_TOKENS, NUM_CANDIDATES = 1024, 600
"""Of a batch, and likeliest next tokens kept of each."""


class Candidates:
    """What the policy might have sampled: for each token of the batch, candidate -> log-prob."""

    def __init__(self) -> None:
        self.tokens = [
            {f"{token}/{rank}": -0.01 * rank for rank in range(NUM_CANDIDATES)} for token in range(NUM_TOKENS)
        ]


@functools.cache
def known_candidates() -> Candidates:
    """Made once: only sending them is meant to take time."""
    return Candidates()


def by_value(original: Step) -> Step:
    """The step, with one more argument that it does not read."""
    body: Any = original.fn.__wrapped__  # type: ignore[attr-defined] - the step's own function

    @step(role=original.role, name=original.name, reads=original.reads, writes=original.writes)
    def with_candidates(at: Any, batch: Any, candidates: Candidates) -> Any:
        return body(at, batch)

    return with_candidates


_scoring = [by_value(one) for one in (reward, actor_log_probs, reference, critic_values)]
_updates = [by_value(one) for one in (actor_update, critic_update)]


@flow(name="ppo-by-value", flow_run_name="{config.name}")
def ppo_by_value(config: RunConfig) -> dict[str, Any]:
    """`ppo` with the iteration below."""
    with open_run(config, None) as run:
        prepare(run, preparation)
        while not run.is_finished:
            with recovering(run):
                commit(run, run.call(iteration_by_value))
        return finish(run)


@flow(name="iteration", flow_run_name=iteration_run_name, task_runner=pool_runner())
def iteration_by_value(iteration: int, attempt: int) -> Any:
    """As `flows.ppo.iteration`, but the driver waits for the batch and sends it along."""
    run, at = current_session(), current_session().stamp()
    batch = rollout.submit(at, at.policy_version, run.solved)
    batch.wait()
    candidates = known_candidates()
    scored = [one.submit(at, batch, candidates) for one in _scoring]
    estimated = advantage.submit(at, [batch, *scored])
    everything = [batch, *scored, estimated]
    updates = [one.submit(at, everything, candidates) for one in _updates]
    synced = weight_sync.submit(at, at.policy_version + 1, wait_for=updates)
    return run.gather(at, [batch, *scored, estimated, *updates, synced])
