"""What a run reads, looked at before anything is started: models, tokenizers, tables of prompts.

The command line looks before it starts a server, the flow looks for whoever calls it without one, and workers check the
same again where they run. Here a mistake costs seconds and ends with one block of text.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from configs.model import ModelConfig
from configs.parallel_rules import shape_problems
from configs.problems import UNSAID, ConfigError, Problem
from configs.run import RunConfig
from resources.import_paths import add_import_paths
from resources.memory import models_of
from resources.model_shapes import read_shape, shape_contradictions
from resources.prompt_sources import load_rows
from resources.prompt_tables import PromptError
from resources.row_counts import count_rows, shortages
from resources.weight_files import damaged_models

READ_FROM_ELSEWHERE = ("json", "parquet", "hub", "python")
RENDERED_AT_MOST = 50_000
"""Rows that are tokenized here besides, a second or two; of larger tables the workers tell what is too long."""
FEW_ROWS = 64
"""Generated, to see whether all of them have to be looked at: ten thousand take seconds."""


def check_inputs(config: RunConfig) -> None:
    """Raises ConfigError with every problem. Of a cluster elsewhere only its own nodes know what they can read."""
    add_import_paths(config.code.import_paths)
    if config.ray.address is not None:
        return
    counts, problems = count_rows(config)
    damaged = [*shape_contradictions(models_of(config)), *damaged_models(config)]
    models = damaged or _model_problems(config)
    problems = [*_absent_folders(config), *models, *problems, *shortages(config, counts)]
    problems += _tool_problems(config)
    if not problems and sum(counts.values()) <= RENDERED_AT_MOST and _is_worth_rendering(config):
        problems = list(_rendering_problems(config))
    if problems:
        raise ConfigError(config.name, problems)


def _is_worth_rendering(config: RunConfig) -> bool:
    """Tables always; generated sources where none of the first prompts has as few characters as tokens may be."""
    sections = ((config.data.sources, False), (config.validation.sources, True))
    if any(source.kind in READ_FROM_ELSEWHERE for sources, _ in sections for source in sources):
        return True
    try:
        few = [
            load_rows(one.model_copy(update={"size": min(one.size or FEW_ROWS, FEW_ROWS)}), held_out=held_out)
            for sources, held_out in sections
            for one in sources
        ]
    except PromptError:
        return True  # it is told where all rows are made
    return any(all(len(str(row.prompt)) > config.data.max_prompt_length for row in rows) for rows in few)


def _absent_folders(config: RunConfig) -> Iterator[Problem]:
    for number, folder in enumerate(config.code.import_paths):
        if not os.path.isdir(folder):
            yield Problem(f"code.import_paths.{number}", folder, "there is no such folder", "correct it, or remove it")


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    read = {"critic.model": config.critic.model if config.algorithm.needs_critic else None}
    read |= {f"reward.graders.{n}.model": grader.model for n, grader in enumerate(config.reward.graders)}
    others = {path: model for path, model in read.items() if model is not None and model.build is None}
    is_made_here = config.model.build is not None and config.model.tokenizer_path is None
    for path, model in {"model": config.model, **read}.items():
        if model and model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
            rule = "the package flash-attn is not installed here"
            yield Problem(f"{path}.attention", model.attention, rule, "install it on every node, or use sdpa")
    adapted = {path: model for path, model in {"model": config.model, **read}.items() if model and model.lora}
    if is_made_here and not others and not adapted:
        return  # nothing is read, and transformers takes seconds to import
    from resources.models.causal_lm import ModelError, build_skeleton, load_tokenizer
    from resources.models.lora import check_target_modules

    try:
        tokenizer = load_tokenizer(config.model)
        if not is_made_here:
            _check_sizes(config)
            yield from _shape_problems(config)
    except ModelError as error:
        yield Problem("model", UNSAID, str(error))
        return
    for path, model in others.items():
        try:
            is_reward_model = path != "critic.model" or config.critic.from_reward_model
            _check_other(model, tokenizer, is_reward_model=is_reward_model)
        except ModelError as error:
            yield Problem(path, UNSAID, str(error))
            adapted.pop(path, None)
    for path, model in adapted.items():
        try:
            assert model.lora is not None
            check_target_modules(build_skeleton(model), model.lora)
        except ModelError as error:
            yield Problem(f"{path}.lora.target_modules", UNSAID, str(error))


def _check_other(model: ModelConfig, tokenizer: Any, *, is_reward_model: bool) -> None:
    """Raise ModelError for a critic or a reward model that is not there, is something else, or reads other tokens."""
    from resources.models.causal_lm import ModelError, check_model_folder, check_same_tokens
    from resources.models.value_head import check_reward_model

    check_model_folder(model)
    try:
        if is_reward_model:
            check_reward_model(model)
        check_same_tokens(tokenizer, model)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError) as error:  # whatever transformers says of a broken folder
        raise ModelError(f"{model.path} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _check_sizes(config: RunConfig) -> None:
    """What is sampled has positions and embeddings in the model that was found, whatever `model.shape` says."""
    from resources.models.causal_lm import ModelError, load_model_config

    shape = load_model_config(config.model).get_text_config()
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    beyond = [token for token in config.rollout.sampling.stop_token_ids if token >= int(shape.vocab_size)]
    if beyond:
        raise ModelError(
            f"rollout.sampling.stop_token_ids has {beyond}, which no response can hold: the model has "
            f"{shape.vocab_size} tokens; give ids of its own tokenizer"
        )
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is not None and positions < longest:
        raise ModelError(
            f"{config.model.path or 'the model'} has {positions} positions, and data.max_prompt_length + "
            f"rollout.max_response_length = {longest} tokens do not fit; lower one of them"
        )


def _shape_problems(config: RunConfig) -> Iterator[Problem]:
    from resources.models.causal_lm import load_model_config

    facts = load_model_config(config.model).get_text_config().to_dict()
    try:
        shape = read_shape("model", str(config.model.path), facts)
    except ConfigError:
        return  # an architecture with other words for its sizes: its workers know whether they can cut it
    yield from shape_problems(config, {"model": shape})


def _rendering_problems(config: RunConfig) -> Iterator[Problem]:
    """What only the rendered prompts tell: how long they are, and whether the chat template takes them."""
    from resources.agent_rollout import tool_schemas  # these import transformers
    from resources.models.causal_lm import load_tokenizer
    from resources.prompts import PromptSource

    tokenizer, tools = load_tokenizer(config.model), tool_schemas(config.rollout)
    try:
        PromptSource(config.data, tokenizer, tools=tools)
    except PromptError as error:
        yield Problem("data", UNSAID, str(error))
        return
    try:
        if config.validation.sources:
            PromptSource.for_validation(config.validation, config.data, tokenizer, tools)
    except PromptError as error:
        yield Problem("validation", UNSAID, str(error))


def _tool_problems(config: RunConfig) -> Iterator[Problem]:
    """Functions and environments that cannot be offered; the workers would find out one by one."""
    from resources.tools.schema import ToolError, load_tools

    tools = config.rollout.tools
    if tools is None:
        return
    try:
        load_tools(tools.functions)
    except ToolError as error:
        yield Problem("rollout.tools.functions", UNSAID, str(error))
    if tools.environment is not None:
        from resources.environments import EnvironmentPathError, find_environment  # imports Ray

        try:
            find_environment(tools.environment, tools.environment_options)
        except EnvironmentPathError as error:
            yield Problem("rollout.tools.environment", UNSAID, str(error))
