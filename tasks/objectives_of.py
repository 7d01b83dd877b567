"""From the configuration to the functions that workers run: values made of pure functions and numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from configs.run import RunConfig
from tasks.algorithms.advantage_step import columns_read, estimate_advantages
from tasks.algorithms.objectives import actor_objective, critic_objective, policy_loss_knobs
from tasks.hooks import checked_advantages, checked_loss, own_function

ACTOR_COLUMNS = ("input_ids", "response_mask", "train_mask", "old_log_probs", "advantages")
"""What every actor objective reads; `old_log_probs` only where they were computed."""
TOP_K_COLUMNS = ("teacher_top_k_ids", "teacher_top_k_log_probs")
"""The teacher's likeliest tokens, with `forward_kl_top_k`."""
HOOK_COLUMNS = ("old_log_probs", "entropy", "rollout_log_probs")
"""What an advantage or a loss of the user's may read in any run, beside what the algorithm's own reads."""
CRITIC_COLUMNS = ("input_ids", "response_mask", "train_mask", "values", "returns")
"""What the critic's objective reads."""


def actor_loss(config: RunConfig, kl_coef: float) -> Callable[..., Any]:
    """The actor's objective with its numbers filled in; the user's own where `algorithm.loss` names one.

    `kl_coef` is the controller's of this iteration.
    """
    algorithm = config.algorithm.resolved()
    common: dict[str, Any] = {
        "aggregation": algorithm.aggregation,
        "entropy_coef": algorithm.entropy_coef,
        "kl_coef": kl_coef if algorithm.kl_place == "loss" else 0.0,
        "kl_estimator": algorithm.kl_estimator,
        "max_response_length": config.rollout.max_response_length,
    }
    distillation = config.distillation
    if distillation is not None and distillation.objective == "reverse_kl_loss":
        common["teacher_kl_coef"] = distillation.coef
    if distillation is not None and distillation.objective == "forward_kl_top_k":
        common["top_k_kl_coef"] = distillation.coef
    own = config.algorithm.loss
    if own is not None:
        function = own_function(own, "algorithm.loss", ("log_probs", "entropy", "td"), common)
        return partial(checked_loss, function=function, path=own)
    knobs = {
        name: getattr(algorithm, _knob(name)) for name in policy_loss_knobs(algorithm.name) if _has(algorithm, name)
    }
    return partial(actor_objective, policy_loss=algorithm.name, **common, **knobs)


def critic_loss(config: RunConfig) -> Callable[..., Any]:
    """The critic's objective with its numbers filled in."""
    return partial(critic_objective, value_clip=config.algorithm.value_clip)


def advantage_function(config: RunConfig, kl_coef: float, seed: int) -> Callable[..., Any]:
    """The estimator with its numbers filled in; `kl_coef` is the controller's of this iteration."""
    algorithm = config.algorithm.resolved()
    settings: dict[str, Any] = {
        **_advantage_settings(config),
        "gamma": algorithm.gamma,
        "gae_lambda": algorithm.gae_lambda,
        "whiten_advantages": algorithm.whiten_advantages,
        "scale_by_std": algorithm.scale_by_std,
        "task_weight": task_weight(config),
        "kl_coef": kl_coef,
        "kl_estimator": algorithm.kl_estimator,
        "pass_k": algorithm.pass_k,
        "pass_threshold": algorithm.pass_threshold,
        "correction_lower": config.algorithm.correction.lower,
        "correction_upper": config.algorithm.correction.upper,
        "covariance_fraction": algorithm.covariance_fraction,
        "seed": seed,
    }
    own = config.algorithm.advantage
    if own is None:
        return partial(estimate_advantages, **settings)
    return partial(
        checked_advantages,
        function=own_function(own, "algorithm.advantage", ("columns",), settings),
        path=own,
        needed=_needed_of_own(config),
        correction=config.correction_mode,
        correction_lower=config.algorithm.correction.lower,
        correction_upper=config.algorithm.correction.upper,
    )


def _needed_of_own(config: RunConfig) -> tuple[str, ...]:
    """What the updates read that only an estimator can make."""
    returns = ("returns",) if config.algorithm.needs_critic else ()
    return (*returns, *(name for name in actor_columns(config) if name == "selected_mask"))


def advantage_columns(config: RunConfig) -> tuple[str, ...]:
    """Columns the advantage step needs under this configuration."""
    needed = columns_read(**_advantage_settings(config))
    measures_kl = config.algorithm.needs_reference and config.recomputes_log_probs
    extra = ("old_log_probs", "ref_log_probs") if measures_kl else ()
    taught = ("old_log_probs", "teacher_log_probs") if config.distillation is not None else ()
    # An engine that drifts from the actor shows in the gap between the two, whether it is corrected or not.
    gap = ("old_log_probs", "rollout_log_probs") if config.recomputes_log_probs else ()
    own = HOOK_COLUMNS if config.algorithm.advantage is not None else ()
    return tuple(dict.fromkeys((*needed, "group_ids", *extra, *taught, *gap, *own)))


def actor_columns(config: RunConfig) -> tuple[str, ...]:
    """Columns the actor update needs under this configuration."""
    from tasks.algorithms.policy_losses import LOSS_COLUMNS

    algorithm = config.algorithm.resolved()
    names = [*ACTOR_COLUMNS, *LOSS_COLUMNS.get(algorithm.name, ())]
    if not config.recomputes_log_probs:
        names.remove("old_log_probs")
    if algorithm.kl_coef and algorithm.kl_place == "loss":
        names.append("ref_log_probs")
    if config.correction_mode != "off":
        names.append("correction_weights")
    if config.algorithm.loss is not None:
        names += HOOK_COLUMNS
    if config.distillation is not None and config.distillation.objective == "reverse_kl_loss":
        names.append("teacher_log_probs")
    if config.distillation is not None and config.distillation.objective == "forward_kl_top_k":
        names += TOP_K_COLUMNS
    return tuple(dict.fromkeys(names))


def _advantage_settings(config: RunConfig) -> dict[str, Any]:
    algorithm = config.algorithm.resolved()
    return {
        **_estimator_of(config, algorithm.name),
        "kl_in_reward": algorithm.kl_place == "reward" and algorithm.kl_coef > 0,
        "correction": config.correction_mode,
        "bootstrap_truncated": config.algorithm.bootstrap_truncated,
    }


def _estimator_of(config: RunConfig, name: str) -> dict[str, Any]:
    """Which estimator gives the task's advantages, and the weights of task and teacher."""
    distillation = config.distillation
    if distillation is None:
        return {"estimator": name, "teacher_coef": 0.0}
    teacher_coef = distillation.coef if distillation.objective == "reverse_kl_reward" else 0.0
    task_weight = distillation.task_reward_weight
    if name != "distillation":
        return {"estimator": name, "teacher_coef": teacher_coef}
    if not task_weight:  # the teacher alone: its advantages, or none when it acts through the loss
        return {"estimator": name, "teacher_coef": 0.0}
    task = "rloo" if config.rollout.group_size > 1 else "reinforce_plus_plus"
    return {"estimator": task, "teacher_coef": teacher_coef}


def task_weight(config: RunConfig) -> float:
    """What the estimator's advantages are multiplied by."""
    distillation = config.distillation
    if distillation is None:
        return 1.0
    if config.algorithm.name != "distillation":
        return 1.0 if distillation.task_reward_weight is None else distillation.task_reward_weight
    if distillation.task_reward_weight:
        return distillation.task_reward_weight
    return distillation.coef if distillation.objective == "reverse_kl_reward" else 0.0


_KNOB_NAMES = {"temperature_positive": "soft_temperature_positive", "temperature_negative": "soft_temperature_negative"}
"""A loss function's own short name -> the config's."""


def _knob(name: str) -> str:
    return _KNOB_NAMES.get(name, name)


def _has(algorithm: Any, name: str) -> bool:
    return _knob(name) in type(algorithm).__dataclass_fields__
