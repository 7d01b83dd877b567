"""What a run does about losses that are no numbers: skip the step and count, or stop."""

from collections.abc import Mapping

from configs.training import RecoveryConfig
from resources.run_directory import RunDirectory
from tasks.run_state import RunState

SKIPPED = ("actor/skipped_steps", "critic/skipped_steps")
"""Optimizer steps that changed nothing because the gradient's norm was nan or infinite, by role."""


class NanLossError(RuntimeError):
    """Losses are no numbers, more often than `recovery` allows; the run stops before the iteration is committed."""


def check_nan_policy(
    recovery: RecoveryConfig, directory: RunDirectory, state: RunState, metrics: Mapping[str, float]
) -> int:
    """Skipped steps of the run so far, this iteration's included. Raises NanLossError, see `recovery.on_nan_loss`."""
    skipped = {name: int(metrics[name]) for name in SKIPPED if metrics.get(name)}
    total = state.nan_steps + sum(skipped.values())
    if not skipped:
        return total
    where = ", ".join(f"{name} = {count}" for name, count in skipped.items())
    directory.event("nan-loss", iteration=state.iteration, total=total, **skipped)
    if recovery.on_nan_loss == "stop" or total > recovery.max_nan_steps:
        allowed = "recovery.on_nan_loss is stop" if recovery.on_nan_loss == "stop" else (
            f"recovery.max_nan_steps allows {recovery.max_nan_steps} in a run"
        )  # fmt: skip
        raise NanLossError(
            f"iteration {state.iteration}: the gradient was no number in {total} optimizer steps so far ({where}) "
            f"and {allowed}. The iteration is not committed; lower {_learning_rates(skipped)} in "
            f"{directory.config_file} and go on with: callsheet resume {directory.path}"
        )
    return total


def _learning_rates(skipped: Mapping[str, int]) -> str:
    """The keys of a config that a person may lower.

    >>> _learning_rates({"critic/skipped_steps": 1})
    'critic.optimizer.lr'
    """
    return " and ".join(f"{name.partition('/')[0]}.optimizer.lr" for name in skipped)
