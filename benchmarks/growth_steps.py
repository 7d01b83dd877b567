"""An iteration of no-op steps whose rollout leaves a megabyte in the store: what many of them, or ranks, add up to."""

from typing import Any

from prefect import flow
from prefect.context import FlowRunContext

from benchmarks.noop_steps import STEPS, run_dag
from tasks.replies import call
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step
from tasks.subflow import iteration_run_name


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
    del attempt  # it is in the run's name
    run_dag(storing_rollout, iteration, 120.0)
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.id
