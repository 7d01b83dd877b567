"""The nine steps of a PPO iteration with workers that do nothing: what is left is the price of being told to."""

from collections.abc import Sequence
from typing import Any

from resources.store import BatchHandle
from tasks.collect import collect
from tasks.host import host
from tasks.runner import StepFuture
from tasks.step import Step, StepResult, step

ROLE_POOLS = {
    "rollout": "sampling",
    "reward": "scoring",
    "reference": "scoring",
    "advantage": "training",
    "critic": "training",
    "actor": "training",
}


def _noop(name: str, role: str) -> Step:
    def body(iteration: int, policy_version: int, *, batches: Any = None) -> StepResult:
        answers = host().group(role).call("work")
        handle = BatchHandle(pool=host().pool, batch_id=f"{iteration:06d}-1")
        return StepResult(handle=handle, metrics={f"{role}/answers": float(sum(answers))})

    body.__qualname__ = name.replace("-", "_")
    return step(role=role, name=name)(body)


rollout = _noop("rollout", "rollout")
reward = _noop("reward", "reward")
reference = _noop("reference", "reference")
actor_log_probs = _noop("actor-log-probs", "actor")
critic_values = _noop("critic-values", "critic")
advantage = _noop("advantage", "advantage")
actor_update = _noop("actor-update", "actor")
critic_update = _noop("critic-update", "critic")
weight_sync = _noop("weight-sync", "actor")

STEPS = (
    rollout,
    reward,
    reference,
    actor_log_probs,
    critic_values,
    advantage,
    actor_update,
    critic_update,
    weight_sync,
)


def run_dag(sampling: Step, iteration: int, deadline_seconds: float) -> Sequence[StepFuture]:
    """One iteration of PPO whose batch comes from `sampling`; its steps, all ended. Call it within a flow."""
    batch = sampling.submit(iteration, iteration)
    scoring = (reward, reference, actor_log_probs, critic_values)
    scored = [one.submit(iteration, iteration, batches=[batch]) for one in scoring]
    estimated = advantage.submit(iteration, iteration, batches=[batch, *scored])
    updates = [one.submit(iteration, iteration, batches=[batch, estimated]) for one in (actor_update, critic_update)]
    synced = weight_sync.submit(iteration, iteration + 1, batches=updates)
    steps = [batch, *scored, estimated, *updates, synced]
    collect(steps, deadline_seconds)
    return steps
