"""The reference step: responses scored under the policy that does not learn."""

from resources.store import BatchHandle
from tasks.host import host
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step


@step(role="reference", reads=("input_ids", "response_mask"), writes=("ref_log_probs",))
def reference(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `ref_log_probs`."""
    temperature = host().config.rollout.sampling.temperature
    rows = host().read(batch)
    return call("reference", "score", rows, temperature=temperature, is_bulk=True).keep(at.batch_id)


@step(role="actor", reads=("input_ids", "response_mask"), writes=("ref_log_probs",))
def adapter_reference(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `ref_log_probs` of a LoRA run: the actor scores with its adapters off, and no second model is held."""
    temperature = host().config.rollout.sampling.temperature
    rows = host().read(batch)
    return call("actor", "score_reference", rows, temperature=temperature, is_bulk=True).keep(at.batch_id)
