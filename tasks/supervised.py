"""The warm-up's steps: demonstrations as rows, and one pass of supervised updates over them."""

from resources.store import BatchHandle
from tasks.algorithms.supervised import supervised_objective
from tasks.host import host
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step
from tasks.training import train

DEMONSTRATION_COLUMNS = ("prompt_lengths", "response_lengths", "input_ids", "response_mask", "train_mask")


@step(role="actor", writes=DEMONSTRATION_COLUMNS)
def demonstrations(at: Stamp) -> StepResult:
    """Add the prompts from `at.start` on, answered as the data says."""
    return call("demonstrations", "read", at.epoch, at.start, at.count, is_bulk=True).keep(at.batch_id)


@step(role="actor", reads=("input_ids", "response_mask", "train_mask"))
def actor_fit(at: Stamp, batch: BatchHandle, steps: int) -> StepResult:
    """Take `steps` optimizer steps of next-token cross-entropy on the rows, in their order."""
    config = host().config
    plan = {"num_mini_batches": steps, "num_ppo_epochs": 1, "shuffle": False}
    return train("actor", at, host().read(batch), config.actor, supervised_objective, plan=plan).result()


@step(role="actor")
def publish_model(at: Stamp, folder: str) -> StepResult:
    """Write the actor as a Hugging Face folder that every other role starts from."""
    call("actor", "export", folder)
    return StepResult(facts={"folder": folder})
