"""The samples step: every row of the iteration is kept with its text, in one parquet file that a person can read."""

from functools import partial
from typing import Any

from resources.samples import write_samples
from resources.store import BatchHandle
from tasks.host import host
from tasks.replies import call
from tasks.reward import REWARD_COLUMNS
from tasks.stamp import Stamp
from tasks.step import StepResult, step

KEPT_COLUMNS = (
    *REWARD_COLUMNS, "prompt_lengths", "policy_versions", "rollout_log_probs", "scores", "grades", "advantages",
    "train_mask",
)  # fmt: skip
SHOWN_CHARACTERS = 12_000
"""Of prompts and responses in all that go through the flow process in one iteration, however many samples there are."""


@step(role="reward", reads=KEPT_COLUMNS)
def samples(at: Stamp, batches: list[BatchHandle], folder: str) -> StepResult:
    """Write the iteration's rows below `folder`; the facts hold a few of them, cut short, for the UI."""
    count = host().config.telemetry.samples_per_iteration
    characters = SHOWN_CHARACTERS // (2 * max(1, count))
    fn: Any = partial(write_samples, folder=folder, iteration=at.iteration, count=count, characters=characters)
    replies = call("reward", "report", fn, host().read(*batches))
    answer = replies.statuses[0]["answer"]
    problem = {"problem": answer["error"]} if "error" in answer else {}
    return StepResult(facts={"samples": answer["shown"], **problem}, spans=replies.spans)
