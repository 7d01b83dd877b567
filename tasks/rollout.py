"""The rollout step: the engines read their prompts and sample responses."""

from tasks.host import host
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step

ROLLOUT_COLUMNS = (
    "prompt_lengths", "response_lengths", "finish_reasons", "policy_versions", "record", "input_ids", "response_mask",
    "rollout_log_probs",
)  # fmt: skip


@step(role="rollout", writes=ROLLOUT_COLUMNS)
def rollout(at: Stamp, policy_version: int) -> StepResult:
    """Sample the responses of an iteration; adds ROLLOUT_COLUMNS.

    Nothing but numbers comes in: which prompts they are is read by the engines themselves.
    """
    config = host().config
    replies = call(
        "rollout",
        "sample",
        at.epoch,
        at.start,
        at.count,
        config.rollout.group_size,
        at.iteration,
        policy_version,
        is_bulk=True,
    )
    return replies.keep(at.batch_id, next_position=replies.statuses[0]["next_position"])
