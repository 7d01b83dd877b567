"""Rows that a policy is fitted to: each has an answer, unless the turns of the demonstrations hold none."""

from collections.abc import Iterator

from configs.problems import UNSAID, ConfigError, Problem
from configs.run import RunConfig
from resources.prompt_sources import load_rows
from resources.prompt_tables import MOST_LISTED

WARM_UP_EPOCH = 1_000_000
"""Far behind any epoch of training, so the warm-up has an order of rows of its own."""
_ALWAYS_ANSWERED = ("sorting", "calculator")


def check_answers(config: RunConfig) -> None:
    """Raises ConfigError with the rows of a warm-up that have no answer to learn, before anything is started.

    Of a cluster elsewhere only its own nodes know what they can read.
    """
    sft = config.sft
    if config.ray.address is not None or sft is None or not sft.learns_answers or not _may_lack_answers(config):
        return
    if problems := list(_problems(config, sft.steps * sft.batch_size)):
        raise ConfigError(config.name, problems)


def _may_lack_answers(config: RunConfig) -> bool:
    """Whether any row lacks one; of reasoning-gym, whose data sets answer every row or none, the first tells it."""
    for source in config.data.sources:
        if source.kind not in _ALWAYS_ANSWERED:
            read = source.model_copy(update={"size": 1}) if source.kind == "reasoning_gym" else source
            if not all(row.answer.strip() for row in load_rows(read)):
                return True
    return False


def _problems(config: RunConfig, count: int) -> Iterator[Problem]:
    """Of the rows that are read: a table may have others without an answer."""
    from resources.agent_rollout import tool_schemas  # these import transformers
    from resources.models.causal_lm import load_tokenizer
    from resources.prompts import PromptSource

    prompts = PromptSource(config.data, load_tokenizer(config.model), tools=tool_schemas(config.rollout))
    read = prompts.rows(WARM_UP_EPOCH, 0, count).prompts
    for number, source in enumerate(config.data.sources):
        bare = sorted({one.index for one in read if one.source == source.name and not one.answer.strip()})
        if bare:
            told = (
                f"source {source.name!r}: rows {bare[:MOST_LISTED]} ({len(bare)} in all) have no answer, and the "
                f"{count} rows of sft.steps x sft.batch_size are learnt from theirs; fill them in or remove them, give "
                "sft.turns without {answer}, or set sft.steps to 0"
            )
            yield Problem(f"data.sources.{number}", UNSAID, told)
