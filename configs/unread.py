"""Settings that were given and that this run does not read: told in a plan and at the start, not refused.

A preset whose algorithm was replaced has some, and so has a config that switches a part off for a while.
"""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from configs.layout import placed
from configs.run import RunConfig


def unread_notes(config: RunConfig) -> list[str]:
    """One line each: the key, and why nothing reads it."""
    return [f"{key} is set, and {reason}" for key, reason in _unread(config)]


def _unread(config: RunConfig) -> Iterator[tuple[str, str]]:
    algorithm = config.algorithm
    for knob in algorithm.unread():
        yield f"algorithm.{knob}", f"{algorithm.name} does not read it"
    if "critic" in config.model_fields_set and not algorithm.needs_critic:
        yield "critic", f"{algorithm.name} has no critic"
    yield from _of_the_kl(config)
    yield from _of_the_data(config)
    yield from _of_the_correction(config)
    yield from _of_the_servers(config)
    yield from _of_the_graders(config)
    if config.pools[placed(config, "rollout").pool].accelerator == "none":
        for key in _given(config.rollout, ["gpu_memory_fraction"]):
            yield f"rollout.{key}", "the pool of the rollout has no accelerators"
    roles = {"actor": config.actor, "critic": config.critic}
    for path, optimizer in {f"{role}.optimizer": settings.optimizer for role, settings in roles.items()}.items():
        if optimizer.schedule == "constant":
            for key in _given(optimizer, ["total_steps"]):
                yield f"{path}.{key}", "the schedule is constant"
    if not config.recovery.enabled:
        for key in _given(config.recovery, ["snapshot_every", "max_recoveries", "backoff_seconds", "allow_smaller"]):
            yield f"recovery.{key}", "recovery.enabled is false"


def _of_the_kl(config: RunConfig) -> Iterator[tuple[str, str]]:
    kl = config.algorithm.kl
    if kl.coef == 0.0:
        for key in _given(kl, ["place", "estimator", "controller", "target", "horizon", "refresh_every"]):
            yield f"algorithm.kl.{key}", "algorithm.kl.coef is 0"
    elif kl.controller == "fixed":
        for key in _given(kl, ["target", "horizon"]):
            yield f"algorithm.kl.{key}", "algorithm.kl.controller is fixed"


def _of_the_data(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.data.curriculum == "none":
        for key in _given(config.data, ["solved_score"]):
            yield f"data.{key}", "data.curriculum is none"
    validation = config.validation
    if validation.sources and not (validation.every or validation.at_start or validation.at_end):
        yield "validation.sources", "validation.every is 0, and neither at_start nor at_end is true"


def _of_the_correction(config: RunConfig) -> Iterator[tuple[str, str]]:
    algorithm = config.algorithm
    if config.correction_mode == "off":
        for key in _given(algorithm.correction, ["lower", "upper"]):
            yield f"algorithm.correction.{key}", "nothing is corrected (algorithm.correction.mode)"
    if not algorithm.resolved().dynamic_sampling:
        for key in _given(algorithm.dynamic_sampling, ["max_rounds"]):
            yield f"algorithm.dynamic_sampling.{key}", "algorithm.dynamic_sampling.enabled is not true"
    if config.distillation is not None and config.distillation.objective != "forward_kl_top_k":
        for key in _given(config.distillation, ["top_k"]):
            yield f"distillation.{key}", f"distillation.objective is {config.distillation.objective}"


def _of_the_servers(config: RunConfig) -> Iterator[tuple[str, str]]:
    servers = config.rollout.servers
    if not servers.enabled:
        for key in _given(
            servers, ["agent_processes", "agent_seconds", "request_deadline_seconds", "max_redispatches"]
        ):
            yield f"rollout.servers.{key}", "rollout.servers.enabled is false"
    elif servers.agent is None:
        for key in _given(servers, ["agent_processes", "agent_seconds"]):
            yield f"rollout.servers.{key}", "rollout.servers.agent is not set"


def _of_the_graders(config: RunConfig) -> Iterator[tuple[str, str]]:
    for index, grader in enumerate(config.reward.graders):
        if grader.on_failure != "retry":
            for key in _given(grader, ["retries"]):
                yield f"reward.graders.{index}.{key}", f"on_failure is {grader.on_failure}"


def _given(section: BaseModel, keys: Iterable[str]) -> Iterator[str]:
    """Those of `keys` that stand in the config with another value than they would have anyway."""
    for key in keys:
        default = type(section).model_fields[key].get_default(call_default_factory=True)
        if key in section.model_fields_set and getattr(section, key) != default:
            yield key
