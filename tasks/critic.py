"""The critic's steps: values before the update, and the update."""

from resources.store import BatchHandle
from tasks.host import host
from tasks.objectives_of import CRITIC_COLUMNS, critic_loss
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step
from tasks.training import train


@step(role="critic", reads=("input_ids", "response_mask"), writes=("values", "bootstrap_values"))
def critic_values(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `values`: of the prefix before each token, under the critic as it is now.

    With `algorithm.bootstrap_truncated` also `bootstrap_values`: of the whole row.
    """
    with_last = host().config.algorithm.bootstrap_truncated
    return call("critic", "estimate_values", host().read(batch), with_last, is_bulk=True).keep(at.batch_id)


@step(role="critic", reads=CRITIC_COLUMNS)
def critic_update(at: Stamp, batches: list[BatchHandle]) -> StepResult:
    """Train the critic on the iteration's returns."""
    config = host().config
    return train("critic", at, host().read(*batches), config.critic, critic_loss(config)).result()
