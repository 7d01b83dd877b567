"""An iteration of no-op steps whose rollout leaves a megabyte in the store: what many of them, or ranks, add up to."""

from typing import Any

import numpy as np
from prefect import flow
from prefect.context import FlowRunContext

from benchmarks.noop_steps import (
    STEPS,
    NoopWorker,
    actor_log_probs,
    actor_update,
    advantage,
    critic_update,
    critic_values,
    reference,
    reward,
    weight_sync,
)
from resources.dispatch import Dispatch, dispatch
from tasks.collect import collect
from tasks.replies import call
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step
from tasks.subflow import iteration_run_name

ROW_BYTES, ROWS = 2**14, 64
"""A megabyte an iteration."""


class StoringWorker(NoopWorker):
    """Answers at once, and can leave rows in the store. Needs no torch."""

    @dispatch(Dispatch.RANK_ZERO, bulk=True)
    def rows(self, iteration: int) -> tuple[dict[str, Any], Any]:
        """New rows, as a rollout makes them."""
        row_ids = list(range(iteration * ROWS, (iteration + 1) * ROWS))
        data = {"row_ids": np.array(row_ids), "input_ids": np.zeros((ROWS, ROW_BYTES), dtype=np.uint8)}
        return {"shard": {"row_ids": row_ids, "columns": ["input_ids", "row_ids"]}}, data


def batch_id_of(iteration: int) -> str:
    """As the no-op steps name it."""
    return f"{iteration:06d}-1"


@step(role="rollout", name="rollout", writes=("input_ids",))
def storing_rollout(iteration: int, policy_version: int) -> StepResult:
    """Rows that stay in the store until the iteration is committed."""
    del policy_version  # it is in the run's name
    return call("rollout", "rows", iteration, is_bulk=True).keep(batch_id_of(iteration))


GROWTH_STEPS = (storing_rollout, *STEPS[1:])


@flow(name="iteration", flow_run_name=iteration_run_name, task_runner=ON_POOLS, persist_result=False)
def one_iteration(iteration: int, attempt: int) -> Any:
    """The DAG of PPO; gives the id of its flow run."""
    batch = storing_rollout.submit(iteration, iteration)
    scoring = (reward, reference, actor_log_probs, critic_values)
    scored = [one.submit(iteration, iteration, batches=[batch]) for one in scoring]
    estimated = advantage.submit(iteration, iteration, batches=[batch, *scored])
    updates = [one.submit(iteration, iteration, batches=[batch, estimated]) for one in (actor_update, critic_update)]
    synced = weight_sync.submit(iteration, iteration + 1, batches=updates)
    collect([batch, *scored, estimated, *updates, synced], 120.0)
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.id
