"""The reference's steps: responses scored under the policy that does not learn, and its refresh by the actor."""

from resources.store import BatchHandle
from resources.weight_sync import sync_weights
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


@step(role="actor")
def refresh_reference(at: Stamp, policy_version: int) -> StepResult:
    """The actor's weights become the reference's (`algorithm.kl.refresh_every`), checked as an engine's are."""
    config = host().config
    report = sync_weights(
        host().group("actor"),
        host().group("reference"),
        policy_version,
        config.rollout.model_copy(update={"weight_sync": "auto"}),
        vocab_size=host().group("actor").call("vocabulary_size"),
        wire_dtype=config.model.dtype,
        compute_dtype=config.model.dtype,
        max_probe_tokens=config.data.max_prompt_length,
        timeout=config.recovery.call_deadline_seconds,
    )
    return StepResult(facts={"way": report.way, "bytes": report.num_bytes, "version": report.version})
