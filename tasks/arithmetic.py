"""What is computed in an arithmetic that the hardware has no instructions for."""

from collections.abc import Iterator, Mapping
from typing import Any

from prefect.logging import get_logger

from configs.layout import active_roles, duties, placed
from configs.run import RunConfig
from resources.run_directory import RunDirectory


def tell_slow_arithmetic(config: RunConfig, directory: RunDirectory, hosts: Mapping[str, Mapping[str, Any]]) -> None:
    """An event and a warning for bfloat16 on CPUs without it. `hosts`: pool -> facts of its task host.

    It is no error: the numbers are right, and a config for accelerators may be tried out on any CPU.
    """
    slow = slow_settings(config, {pool for pool, facts in hosts.items() if not facts["multiplies_bfloat16"]})
    for path, pools in slow.items():
        directory.event("slow-bfloat16", setting=path, pools=pools)
        get_logger("callsheet").warning(
            "%s is bfloat16, and the CPUs of pools %s have no instructions for it (AVX512_BF16, AMX): products of"
            " matrices take several times as long as in float32; set %s=float32",
            path, ", ".join(pools), path,
        )  # fmt: skip


def slow_settings(config: RunConfig, without: set[str]) -> dict[str, list[str]]:
    """The settings that ask for bfloat16 on CPUs -> the pools among `without` that compute by them."""
    active = {duty for duty, role in duties(config).items() if role in active_roles(config)}
    found: dict[str, set[str]] = {}
    for path, duty, dtype in _arithmetics(config):
        if duty not in active:
            continue
        pool = placed(config, duty).pool
        if dtype == "bfloat16" and pool in without and config.pools[pool].accelerator == "none":
            found.setdefault(path, set()).add(pool)
    return {path: sorted(pools) for path, pools in found.items()}


def _arithmetics(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(setting, duty that computes by it, dtype)."""
    yield from (("model.dtype", duty, config.model.dtype) for duty in ("actor", "reference"))
    own = config.critic.model
    yield ("model.dtype", "critic", config.model.dtype) if own is None else ("critic.model.dtype", "critic", own.dtype)
    given = config.rollout.dtype
    yield ("model.dtype", "rollout", config.model.dtype) if given is None else ("rollout.dtype", "rollout", given)
    for index, teacher in enumerate(config.teachers):
        yield f"teachers.{index}.model.dtype", "teacher", teacher.model.dtype
    for index, grader in enumerate(config.reward.graders):
        if grader.model is not None:
            yield f"reward.graders.{index}.model.dtype", "reward", grader.model.dtype
        if grader.judge is not None and grader.judge.serve is not None:
            yield f"reward.graders.{index}.judge.serve.dtype", "reward", grader.judge.serve.dtype
