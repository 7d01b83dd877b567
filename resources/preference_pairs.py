"""Pairs of a preferred and a rejected response: what a row has to have to be one."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.problems import UNSAID, ConfigError, Problem
from configs.run import RunConfig
from resources.prompt_sources import load_rows
from resources.prompt_tables import PromptError

REJECTED = "rejected"
"""Column of the rejected response; the preferred one is the source's `answer_column` (usually `chosen`)."""


def pair_of(source: str, index: int, answer: object, extra: Mapping[str, Any]) -> tuple[str, str]:
    """The preferred and the rejected text of a row. Raises PromptError where it lacks one of them."""
    rejected = extra.get(REJECTED)
    if isinstance(answer, str) and answer and isinstance(rejected, str) and rejected:
        return answer, rejected
    raise PromptError(
        f"row {index} of source {source!r} is no preference pair: the preferred response is {answer!r:.40} "
        f"(data.sources[].answer_column) and the rejected one {rejected!r:.40} (column {REJECTED!r}); both are texts"
    )


def check_pairs(config: RunConfig) -> None:
    """Raises ConfigError with the first row of each source that is no pair, before anything is started.

    Of a cluster elsewhere only its own nodes know what they can read.
    """
    if config.ray.address is None and (problems := list(_problems(config))):
        raise ConfigError(config.name, problems)


def _problems(config: RunConfig) -> Iterator[Problem]:
    for number, source in enumerate(config.data.sources):
        try:
            for row in load_rows(source):
                pair_of(source.name, row.index, row.answer, row.extra)
        except PromptError as error:
            yield Problem(f"data.sources.{number}", UNSAID, str(error))
