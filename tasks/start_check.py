"""What a run is refused for before anything is started: what it reads, and the functions that it would call.

A grader or a hook of the user's is called when the first responses are there; that it does not exist, or takes other
arguments, is known now.
"""

import asyncio
import os
import re
from collections.abc import Iterator

from configs.problems import UNSAID, ConfigError, Problem
from configs.run import RunConfig
from resources.code_grader import CodeSettings
from resources.demonstration_rows import check_answers
from resources.grader_pool import GraderImportError, PoolFunction, check_functions
from resources.grader_process import load_function
from resources.import_paths import ImportPathError, import_class
from resources.input_check import check_inputs
from resources.preference_pairs import check_pairs
from resources.sandbox import Sandbox, SandboxUnavailableError
from resources.telemetry.sinks import import_sink
from tasks.graders_of import build_grader

OF_THE_RESPONSE_ALONE = ("overlong_penalty", "response_format")
"""Rules that need nothing of the row, so that an empty response shows whether their options make sense."""
_EMPTY = {"prompt": "", "response": "", "answer": "", "extra": {"response_length": 0, "finish_reason": "stop"}}


def check_start(config: RunConfig, *, trains: bool = True, fits: bool = False) -> None:
    """Raises ConfigError with every problem; see `check_inputs` for clusters elsewhere.

    `trains`: it is a run of iterations, with the warm-up that it asks for; `fits`: a supervised fit alone. Neither: it
    evaluates.
    """
    problems: list[Problem] = []
    try:
        check_inputs(config)
        if trains or fits:
            _check_fitted_rows(config, fits_alone=fits)
    except ConfigError as error:
        problems += error.problems
    problems += [*_cluster_problems(config), *_grader_problems(config)]
    problems += [*_hook_problems(config), *_worker_problems(config), *_sink_problems(config)]
    problems += _warm_up_problems(config) if trains else ()
    if problems:
        raise ConfigError(config.name, problems)


def _check_fitted_rows(config: RunConfig, *, fits_alone: bool) -> None:
    """Raises ConfigError for rows that no supervised step can learn from."""
    if config.sft is not None and config.sft.objective == "reward_model":
        if fits_alone:
            check_pairs(config)
    else:
        check_answers(config)


def _cluster_problems(config: RunConfig) -> Iterator[Problem]:
    named = os.environ.get("RAY_ADDRESS")
    if config.ray.address is None and named and named != "local":
        rule = f"RAY_ADDRESS is {named!r}, and which cluster a run works on stands in its config alone"
        yield Problem("ray.address", None, rule, "set it to HOST:PORT, or unset RAY_ADDRESS to start a cluster here")


def _grader_problems(config: RunConfig) -> Iterator[Problem]:
    blocks = [grader.judge.api_key_block for grader in config.reward.graders if grader.judge is not None]
    unread = {block: "" for block in blocks if block is not None}  # Prefect is asked for keys when it is there
    for index, grader in enumerate(config.reward.graders):
        path = f"reward.graders.{index}"
        try:
            built = build_grader(config, grader, unread)
            if built.kind == "rule":
                rule = load_function(str(built.function), built.options, is_group_wise=built.is_group_wise)
                if grader.function in OF_THE_RESPONSE_ALONE:
                    rule(_EMPTY)
        except (TypeError, ValueError, re.error) as error:
            yield Problem(path, UNSAID, str(error))
            continue
        if isinstance(built.backend, CodeSettings) and config.ray.address is None:
            try:
                Sandbox(built.backend.limits, 1, is_unsafe=built.backend.is_unsafe)
            except SandboxUnavailableError as error:
                yield Problem(path, UNSAID, f"grader {grader.name!r}: {error}")
        if built.kind == "python" and config.ray.address is None:
            function = PoolFunction(
                target=str(built.function), options=built.options, is_group_wise=built.is_group_wise
            )
            try:
                asyncio.run(check_functions([function]))
            except GraderImportError as error:
                way_out = "write module:function of something this Python imports; see code.import_paths"
                yield Problem(f"{path}.function", grader.function, str(error), way_out)


def _warm_up_problems(config: RunConfig) -> Iterator[Problem]:
    if config.sft is not None and config.sft.steps and config.sft.objective != "causal_lm":
        rule = "before a run only the policy is warmed up, on answers (causal_lm)"
        way_out = "fit the reward model by `callsheet sft` first, and train with sft=null"
        yield Problem("sft.objective", config.sft.objective, rule, way_out)


def _worker_problems(config: RunConfig) -> Iterator[Problem]:
    named = {role: where.worker for role, where in config.roles.items() if where.worker is not None}
    if config.ray.address is not None or not named:
        return
    for role, worker in named.items():
        try:
            import_class(worker)
        except ImportPathError as error:
            yield Problem(f"roles.{role}.worker", worker, str(error), "name a class that this Python imports")


def _sink_problems(config: RunConfig) -> Iterator[Problem]:
    for name in config.telemetry.sinks:
        try:
            import_sink(name)
        except ImportError as error:
            yield Problem("telemetry.sinks", UNSAID, str(error))


def _hook_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if config.ray.address is not None or (algorithm.advantage is None and algorithm.loss is None):
        return
    from tasks.objectives_of import actor_loss, advantage_function  # imports torch

    for build in (lambda: advantage_function(config, 0.0, 0), lambda: actor_loss(config, 0.0)):
        try:
            build()
        except ValueError as error:
            yield Problem("algorithm", UNSAID, str(error))
