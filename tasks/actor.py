"""The actor's steps: log-probs before the update, and the update."""

from resources.store import BatchHandle
from resources.update_plan import RATIO_TOLERANCE
from tasks.host import host
from tasks.objectives_of import actor_columns, actor_loss
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step
from tasks.training import train

UPDATE_COLUMNS = (
    "input_ids", "response_mask", "train_mask", "old_log_probs", "entropy", "advantages", "rollout_log_probs",
    "ref_log_probs", "teacher_log_probs", "teacher_top_k_ids", "teacher_top_k_log_probs", "correction_weights",
    "selected_mask",
)  # fmt: skip
"""All that any objective may read; the run's own reads `actor_columns`."""


@step(role="actor", reads=("input_ids", "response_mask"), writes=("old_log_probs", "entropy"))
def actor_log_probs(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `old_log_probs`, of the policy that is about to be updated; `entropy` too where a function of the user's own
    may read it (over a large vocabulary it costs a good part of the pass)."""
    config = host().config
    has_hook = config.algorithm.advantage is not None or config.algorithm.loss is not None
    temperature = config.rollout.sampling.temperature
    replies = call("actor", "compute_log_probs", host().read(batch), temperature, is_bulk=True, with_entropy=has_hook)
    return replies.keep(at.batch_id)


@step(role="actor", reads=UPDATE_COLUMNS)
def actor_update(at: Stamp, batches: list[BatchHandle]) -> StepResult:
    """Train the actor: PPO epochs of mini-batches of micro-batches."""
    config = host().config
    replies = train(
        "actor",
        at,
        host().read(*batches, columns=actor_columns(config)),
        config.actor,
        actor_loss(config, at.kl_coef),
        plan={
            "target_kl": config.algorithm.target_kl,
            "first_ratio_tolerance": RATIO_TOLERANCE[config.model.dtype] if config.recomputes_log_probs else None,
        },
        temperature=config.rollout.sampling.temperature,
        with_entropy=config.algorithm.entropy_coef > 0.0,
    )
    return replies.result()
