"""What the updates of actor and critic share: who does which rows in which optimizer step."""

from collections.abc import Callable, Sequence
from typing import Any

from configs.training import TrainedRoleConfig
from resources.rows import Rows
from resources.update_plan import UpdatePlan, make_update_plans
from tasks.host import host
from tasks.on_rows import update_facts
from tasks.replies import Replies, call
from tasks.stamp import Stamp


def train(
    duty: str,
    at: Stamp,
    rows: Rows,
    settings: TrainedRoleConfig,
    loss: Callable[..., Any],
    *,
    plan: dict[str, Any] | None = None,
    steps_per_call: int | None = None,
    **options: Any,
) -> Replies:
    """Run the optimizer steps of one iteration on the worker group of `duty`.

    The plan is made once, from lengths and masks alone, for all ranks; each rank then reads only its own rows.
    `plan` overrides settings of `make_update_plans`; `steps_per_call` as for `run_plans`; `options` go to the
    worker's `update`.
    """
    config, group = host().config, host().group(duty)
    row_ids, lengths, trained, siblings = update_facts(rows.load(("train_mask", "group_ids")))
    mesh, world_size = group.topology.mesh, group.world_size
    planned = {
        "num_mini_batches": config.algorithm.num_mini_batches,
        "num_ppo_epochs": config.algorithm.num_ppo_epochs,
        **(plan or {}),
    }
    plans = make_update_plans(
        row_ids,
        lengths,
        trained,
        dp_size=mesh.dp_size(world_size),
        micro_batch_size=settings.micro_batch_size,
        micro_batch_tokens=settings.micro_batch_tokens,
        siblings=siblings if duty == "actor" and config.model.share_prompts else None,
        seed=config.seed,
        iteration=at.iteration,
        **planned,
    )
    # Tensor- and sequence-parallel peers get the plan of their data-parallel rank.
    per_rank = [plans[mesh.coordinates(rank, world_size).dp] for rank in range(world_size)]
    return run_plans(duty, rows, per_rank, loss, steps_per_call, **options)


def run_plans(
    duty: str,
    rows: Rows,
    per_rank: Sequence[UpdatePlan],
    loss: Callable[..., Any],
    steps_per_call: int | None = None,
    **options: Any,
) -> Replies:
    """Let each rank take the optimizer steps of its plan, in one call, or in calls of at most `steps_per_call`.

    The deadline of a call then bounds so many steps, and not a fit of hours.
    """
    parts = zip(*(own.in_parts(steps_per_call or max(1, len(own.mini_batches))) for own in per_rank), strict=True)
    answers = [
        call(duty, "update", [rows.select(own.row_ids) for own in part], list(part), loss, **options) for part in parts
    ]
    return Replies(
        statuses=[status for answer in answers for status in answer.statuses],
        spans=tuple(span for answer in answers for span in answer.spans),
    )
