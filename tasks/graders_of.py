"""From the configuration to the graders that reward workers run: plain values, functions by import path."""

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from functools import partial
from typing import Any, TypeVar

from configs.layout import num_workers
from configs.problems import UNSAID, ConfigError, Problem
from configs.reward import GraderConfig, JudgeConfig
from configs.run import RunConfig
from resources.code_grader import CodeSettings
from resources.graders import Grader, Secret
from resources.judge import HttpSettings, JudgeSettings
from resources.sandbox import SandboxLimits
from tasks.rewards.code import plan_runs, score_outputs
from tasks.rewards.length import overlong_penalty
from tasks.rewards.table import GRADERS

S = TypeVar("S", HttpSettings, JudgeSettings)


_COUNTS = ("max_concurrency", "max_retries")
_IMPORTED_FIRST = {"math_answer": ("math_verify",)}
"""What a rule imports when it is called; a grader process does so before, or its seconds would count as grading."""


def build_graders(config: RunConfig, secrets: Mapping[str, str] | None = None) -> tuple[Grader, ...]:
    """The graders of `config.reward`, in its order.

    Keys are read here, where the run starts, and travel masked: from the environment, or from Prefect Secret blocks
    (`secrets`: block name -> value, in place of asking Prefect). Raises ValueError for an unknown rule or option, and
    for a key that is not there.
    """
    return tuple(build_grader(config, grader, secrets) for grader in config.reward.graders)


def check_graders(config: RunConfig) -> None:
    """Raises ConfigError with every option that is not one and every key that is not there, before anything starts.

    What a Secret block of Prefect holds is asked for later, where a server is sure to be.
    """
    problems: list[Problem] = []
    for number, grader in enumerate(config.reward.graders):
        block = grader.judge.api_key_block if grader.judge is not None else None
        try:
            build_grader(config, grader, {block: ""} if block is not None else None)
        except (TypeError, ValueError) as error:
            problems.append(Problem(f"reward.graders.{number}", UNSAID, str(error)))
    if problems:
        raise ConfigError(config.name, problems)


def check_grader_options(config: RunConfig) -> None:
    """As `check_graders`, but for the keys, which the machine that plans a run need not have."""
    graders = tuple(_without_key(grader) for grader in config.reward.graders)
    check_graders(config.model_copy(update={"reward": config.reward.model_copy(update={"graders": graders})}))


def _without_key(grader: GraderConfig) -> GraderConfig:
    if grader.judge is None:
        return grader
    judge = grader.judge.model_copy(update={"api_key_env": None, "api_key_block": None})
    return grader.model_copy(update={"judge": judge})


def build_grader(config: RunConfig, grader: GraderConfig, secrets: Mapping[str, str] | None = None) -> Grader:
    """One of them; see `build_graders`."""
    fields: dict[str, Any] = {
        "name": grader.name,
        "kind": grader.kind,
        "weight": grader.weight,
        "sources": tuple(grader.sources),
        "is_group_wise": grader.is_group_wise,
        "timeout_seconds": grader.timeout_seconds,
        "on_failure": grader.on_failure,
        "retries": grader.retries,
    }
    if grader.kind == "python":
        fields |= {"function": grader.function, "options": dict(grader.options)}
    elif grader.kind == "rule":
        fields |= _rule(config, grader)
    elif grader.kind == "sandbox":
        fields["backend"] = _code(grader)
    elif grader.kind == "http":
        fields["backend"] = _from_options(grader, HttpSettings, url=str(grader.url))
        _check_share(config, grader, fields["backend"])
    elif grader.kind == "judge":
        fields["backend"] = _judge(grader, secrets)
        if not grader.serves_judge:  # else each reward worker has one of its own
            _check_share(config, grader, fields["backend"])
    return Grader(**fields)


def _check_share(config: RunConfig, grader: GraderConfig, settings: HttpSettings | JudgeSettings) -> None:
    """A worker asks for one response at a time at least, so there may be as many workers as requests."""
    workers, limit = num_workers(config, "reward"), settings.max_concurrency
    if workers > limit:
        where = "judge" if grader.kind == "judge" else "options"
        raise ValueError(
            f"{grader.kind} grader {grader.name!r} has max_concurrency {limit} for the {workers} workers of "
            f"roles.reward together, each of which asks for one response at a time or more; raise "
            f"{where}.max_concurrency to {workers}, or set roles.reward.workers to {limit} or less"
        )


def _judge(grader: GraderConfig, secrets: Mapping[str, str] | None) -> JudgeSettings:
    judge = grader.judge
    assert judge is not None, "the schema asks for it"
    return _from_options(
        grader,
        JudgeSettings,
        base_url=judge.base_url or "",
        model=judge.model,
        prompt=judge.prompt,
        key=_key(grader.name, judge, secrets),
        max_tokens=judge.max_tokens,
        max_concurrency=judge.max_concurrency,
        requests_per_minute=judge.requests_per_minute,
        tokens_per_minute=judge.tokens_per_minute,
        max_retries=judge.max_retries,
    )


def _key(name: str, judge: JudgeConfig, secrets: Mapping[str, str] | None) -> Secret | None:
    if judge.api_key_env is not None:
        if not os.environ.get(judge.api_key_env):
            raise ValueError(
                f"judge {name!r} takes its key from {judge.api_key_env}, which is not set; export it first"
            )
        return Secret(os.environ[judge.api_key_env])
    if judge.api_key_block is None:
        return None
    if secrets is not None:
        if judge.api_key_block not in secrets:
            raise ValueError(f"judge {name!r} takes its key from block {judge.api_key_block!r}, which was not given")
        return Secret(secrets[judge.api_key_block])
    from prefect.blocks.system import Secret as SecretBlock  # only a run with such a judge talks to Prefect here

    block: Any = SecretBlock.load(judge.api_key_block)
    return Secret(str(block.get()))


def _code(grader: GraderConfig) -> CodeSettings:
    options = dict(grader.options)
    is_partial = bool(options.pop("partial", False))
    known = {one.name for one in fields_of(SandboxLimits)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"code grader {grader.name!r} has no option {unknown[0]!r}; it takes partial, {sorted(known)}")
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"code grader {grader.name!r} has {option} {value!r}; a limit is a number above 0")
    options.setdefault("wall_seconds", min(SandboxLimits.wall_seconds, grader.timeout_seconds))
    return CodeSettings(
        plan=plan_runs,
        judge=partial(score_outputs, partial=is_partial),
        limits=SandboxLimits(**options),
        is_unsafe=grader.sandbox == "unsafe",
        runs_all=is_partial,
    )


def _from_options(grader: GraderConfig, settings: type[S], **fields: Any) -> S:
    """Settings from the config's fields, with what `options` adds (pauses, bounds of a judge's scale)."""
    known = {one.name for one in fields_of(settings)} - set(fields)  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(grader.options) - known)
    if unknown:
        raise ValueError(f"{grader.kind} grader {grader.name!r} has no option {unknown[0]!r}; it takes {sorted(known)}")
    for option, value in grader.options.items():
        least = {"max_concurrency": 1, "low": -math.inf, "high": -math.inf}.get(option, 0)
        kind, what = (int, "whole number") if option in _COUNTS else (int | float, "number")
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
            raise ValueError(
                f"{grader.kind} grader {grader.name!r} has {option} {value!r}; it is a {what} from {least} on"
            )
    return settings(**fields, **grader.options)


def _rule(config: RunConfig, grader: GraderConfig) -> dict[str, Any]:
    if grader.function not in GRADERS:
        raise ValueError(f"grader {grader.name!r} names rule {grader.function!r}; the rules are {sorted(GRADERS)}")
    options = dict(grader.options)
    _check_options(grader.name, GRADERS[grader.function], options)
    if grader.function == "overlong_penalty":
        if "buffer" not in options:
            raise ValueError(f"grader {grader.name!r} has no option buffer, without which the penalty is always 0")
        options.setdefault("max_length", config.rollout.max_response_length)
    has_scores = config.rollout.servers.agent is not None or (
        config.rollout.tools is not None and config.rollout.tools.environment is not None
    )
    if grader.function == "environment_score" and not has_scores:
        raise ValueError(
            f"grader {grader.name!r} reads the score of an environment, and there is none; set "
            "rollout.tools.environment, or rollout.servers.agent"
        )
    if grader.function == "overlong_penalty":
        overlong_penalty("", "", "", {"response_length": 0}, **options)  # raises ValueError for sizes that do not fit
    found = GRADERS[grader.function]
    return {
        "function": f"{found.__module__}:{found.__qualname__}",
        "modules": _IMPORTED_FIRST.get(grader.function, ()),
        "options": options,
    }


def _check_options(name: str, rule: Callable[..., object], options: Mapping[str, object]) -> None:
    """A rule that raises for every response would leave every row out, one by one."""
    parameters = inspect.signature(rule).parameters.values()
    known = sorted(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"grader {name!r} has no option {unknown[0]!r}; it takes {known}")
    if "pattern" in options:
        try:
            re.compile(str(options["pattern"]))
        except re.error as error:
            raise ValueError(
                f"grader {name!r} has pattern {options['pattern']!r}, which is no regular expression: {error}"
            ) from None
