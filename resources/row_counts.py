"""How many rows the sources of prompts have, counted before anything is started. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from configs.batch_rules import shortage
from configs.data import DEFAULT_SIZE, SourceConfig
from configs.problems import UNSAID, Problem
from configs.run import RunConfig
from resources.prompt_sources import load_rows
from resources.prompt_tables import PromptError

_MADE_HERE = ("sorting", "calculator")
"""Kinds whose rows a plan can make itself, in a moment."""


def planned_shortages(config: RunConfig) -> Iterator[Problem]:
    """What the config alone tells of too few rows: sizes, and spaces of generated tasks; no table is read."""
    counts: dict[str, int] = {}
    for path, source, is_held_out in _sources(config):
        if source.kind not in _MADE_HERE:
            counts |= {} if source.most_rows is None else {path: source.most_rows}
            continue
        try:
            counts[path] = len(load_rows(source, held_out=is_held_out))
        except PromptError as error:
            yield Problem(path, UNSAID, str(error))
    yield from shortages(config, counts)


def count_rows(config: RunConfig) -> tuple[dict[str, int], list[Problem]]:
    """Path of a source -> its rows, and what is wrong with those that cannot be read."""
    counts: dict[str, int] = {}
    problems: list[Problem] = []
    for path, source, is_held_out in _sources(config):
        try:
            counts[path] = _num_rows(source, held_out=is_held_out)
        except PromptError as error:
            problems.append(Problem(path, UNSAID, str(error)))
    return counts, problems


def shortages(config: RunConfig, counts: dict[str, int]) -> Iterator[Problem]:
    """Sections whose sources, once all of them are counted, have fewer rows than are asked for at once."""
    given: dict[str, Any] = {"data": config.data.sources, "validation": config.validation.sources}
    wanted = {
        "data": ("data.prompts_per_iteration", config.data.prompts_per_iteration),
        "validation": ("validation.num_prompts", config.validation.num_prompts),
    }
    for section, (path, number) in wanted.items():
        rows = [count for source, count in counts.items() if source.startswith(f"{section}.")]
        if given[section] and len(rows) == len(given[section]) and sum(rows) < number:
            yield shortage(section, path, number, sum(rows))


def _sources(config: RunConfig) -> Iterator[tuple[str, SourceConfig, bool]]:
    """Path, source, and whether it is held out."""
    for section, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        for number, source in enumerate(sources):
            yield f"{section}.sources.{number}", source, section == "validation"


def _num_rows(source: SourceConfig, *, held_out: bool) -> int:
    """Rows of a source, which are checked; of reasoning-gym, which is slow, one is made to see that it can be."""
    if source.kind != "reasoning_gym":
        return len(load_rows(source, held_out=held_out))
    load_rows(source.model_copy(update={"size": 1}), held_out=held_out)
    return source.size or DEFAULT_SIZE
