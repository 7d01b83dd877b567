"""Supervised steps on the same workers: a warm-up on demonstrations, and a reward model from preference pairs."""

from dataclasses import replace

from resources.batch import row_lengths
from resources.store import BatchHandle
from resources.update_plan import UpdatePlan, make_update_plans
from tasks.algorithms.supervised import preference_objective, supervised_objective
from tasks.host import host
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step
from tasks.training import run_plans, train

DEMONSTRATION_COLUMNS = ("prompt_lengths", "response_lengths", "input_ids", "response_mask", "train_mask")
STEPS_PER_CALL = 20
"""A fit may take hours, and the deadline of a call is for one that hangs."""
PREFERENCE_COLUMNS = ("prompt_lengths", "response_lengths", "input_ids", "response_mask")


@step(role="actor", writes=DEMONSTRATION_COLUMNS)
def demonstrations(at: Stamp) -> StepResult:
    """Add the prompts from `at.start` on, answered as the data says."""
    return call("demonstrations", "read", at.epoch, at.start, at.count, is_bulk=True).keep(at.batch_id)


@step(role="actor", reads=("input_ids", "response_mask", "train_mask"))
def actor_fit(at: Stamp, batch: BatchHandle, steps: int) -> StepResult:
    """Take `steps` optimizer steps of next-token cross-entropy on the rows, in their order."""
    config = host().config
    plan = {"num_mini_batches": steps, "num_ppo_epochs": 1, "shuffle": False}
    rows = host().read(batch)
    return train(
        "actor", at, rows, config.actor, supervised_objective, plan=plan, steps_per_call=STEPS_PER_CALL
    ).result()


@step(role="actor")
def publish_model(at: Stamp, folder: str) -> StepResult:
    """Write the actor as a Hugging Face folder that every other role starts from."""
    call("actor", "export", folder)
    return StepResult(facts={"folder": folder})


@step(role="actor", writes=PREFERENCE_COLUMNS)
def preferences(at: Stamp) -> StepResult:
    """Add the pairs from `at.start` on: two rows a prompt, the preferred response before the rejected one."""
    return call("preferences", "read", at.epoch, at.start, at.count, is_bulk=True).keep(at.batch_id)


@step(role="actor", reads=("input_ids", "response_mask"))
def reward_model_fit(at: Stamp, batch: BatchHandle, steps: int) -> StepResult:
    """Take `steps` optimizer steps of the Bradley-Terry loss on the pairs, in their order."""
    config, group = host().config, host().group("reward_trainer")
    rows = host().read(batch)
    loaded = rows.load(("input_ids",))
    lengths = dict(zip(loaded["row_ids"].tolist(), row_lengths(loaded.get("input_ids")).tolist(), strict=True))
    pairs = sorted(row for row in lengths if row % 2 == 0)
    mesh, world_size = group.topology.mesh, group.world_size
    plans = make_update_plans(
        pairs,
        [2 * max(lengths[row], lengths[row + 1]) for row in pairs],  # both are padded to the longer
        [1] * len(pairs),
        dp_size=mesh.dp_size(world_size),
        num_mini_batches=steps,
        micro_batch_size=max(1, config.actor.micro_batch_size // 2),
        micro_batch_tokens=config.actor.micro_batch_tokens,
        seed=config.seed,
        iteration=at.iteration,
        shuffle=False,
    )
    per_rank = [both_rows(plans[mesh.coordinates(rank, world_size).dp]) for rank in range(world_size)]
    return run_plans("reward_trainer", rows, per_rank, preference_objective, STEPS_PER_CALL).result()


@step(role="actor")
def publish_reward_model(at: Stamp, folder: str) -> StepResult:
    """Write the reward model as a folder that a grader of kind `model` starts from."""
    call("reward_trainer", "export", folder)
    return StepResult(facts={"folder": folder})


def both_rows(plan: UpdatePlan) -> UpdatePlan:
    """A plan over pairs (named by their even row) as one over rows: both of a pair stand side by side.

    >>> [pairs] = make_update_plans([0, 2], [5, 4], [1, 1], micro_batch_size=2)
    >>> both_rows(pairs).mini_batches[0].micro_batches
    ((0, 1, 2, 3),)
    """
    return replace(
        plan,
        mini_batches=tuple(
            replace(
                mini,
                micro_batches=tuple(
                    tuple(row for pair in micro for row in (pair, pair + 1)) for micro in mini.micro_batches
                ),
            )
            for mini in plan.mini_batches
        ),
    )
