"""Where prompts come from, and how they are rendered."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, Items, PathOrName, RowCount, Seed
from configs.problems import as_written

DEFAULT_SIZE = 10_000
"""Rows that a generated source has when its size is left out."""
GENERATED_KINDS = ("sorting", "calculator", "reasoning_gym")


class SourceConfig(Config):
    """One source of prompts."""

    name: Annotated[str, Field(min_length=1)]
    """Metrics and graders are keyed by it."""
    kind: Literal["sorting", "calculator", "reasoning_gym", "json", "parquet", "hub", "python"]
    """`sorting` and `calculator` are generated here; `python` calls `path` as `module:function`."""
    path: PathOrName | None = None
    """File, hub name or import path; for reasoning_gym the dataset's name, for example gsm_symbolic."""
    split: str = "train"
    size: Count | None = None
    """Rows to generate (generated kinds) or to keep (files)."""
    seed: Seed = 0
    """Of the generator; the order of rows has its own seed, `data.seed`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator."""
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of the prompt batch, relative to the other sources."""
    group_size: RowCount | None = None
    """Responses per prompt of this source; rollout.group_size when left out."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> "SourceConfig":
        if self.kind in ("reasoning_gym", "json", "parquet", "hub", "python") and self.path is None:
            raise ValueError(f"source {self.name!r} is of kind {self.kind} and has no path; say where its rows are")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "SourceConfig":
        ignored = {
            "path": self.path is not None and self.kind in ("sorting", "calculator"),
            "split": self.split != "train" and self.kind not in ("hub", "python"),
            "options": bool(self.options) and self.kind in ("json", "parquet"),
        }
        for key, is_given in ignored.items():
            if is_given:
                given = as_written(getattr(self, key))
                raise ValueError(
                    f"source {self.name!r} is of kind {self.kind} and has {key} {given}, which nothing reads; "
                    f"remove {key}, or correct kind"
                )
        return self

    @property
    def most_rows(self) -> int | None:
        """Rows that it has at most, as the config alone tells; None of a table that is kept whole."""
        return self.size or (DEFAULT_SIZE if self.kind in GENERATED_KINDS else None)


class DataConfig(Config):
    """The training prompts."""

    sources: Items[SourceConfig] = Field(min_length=1)
    seed: Seed = 0
    """Order of rows is a function of (this seed, epoch) alone."""
    prompts_per_iteration: RowCount = 64
    max_prompt_length: Count = 512
    """In tokens, after the chat template."""
    overlong_prompts: Literal["filter", "error", "truncate_left", "truncate_right"] = "filter"
    chat_template: bool = False
    """Render prompts as a user message through the tokenizer's chat template."""
    system_prompt: str | None = None
    curriculum: Literal["none", "skip_solved"] = "none"
    """`skip_solved` leaves out prompts that were fully solved in their last visit; the state is checkpointed."""
    solved_score: float = 1.0
    """A prompt is solved when each of its responses scores at least this."""

    @model_validator(mode="after")
    def _names_differ(self) -> "DataConfig":
        check_names(self.sources)
        return self


class ValidationConfig(Config):
    """Scoring of held-out prompts."""

    every: Annotated[int, Field(ge=0)] = 0
    """Iterations between validations; 0 never, except before and after when `at_start` and `at_end` say so."""
    at_start: bool = True
    at_end: bool = True
    sources: Items[SourceConfig] = ()
    """Held-out sources; none turns validation off."""
    num_prompts: Count = 64
    samples_per_prompt: Count = 1
    greedy: bool = True
    """Score the greedy response too."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Of the samples; below 0.01 vLLM raises it without a word. `greedy` is what 0 would mean."""

    @model_validator(mode="after")
    def _names_differ(self) -> "ValidationConfig":
        check_names(self.sources)
        return self


def check_names(sources: Sequence[SourceConfig]) -> None:
    """Raise ValueError for a name given twice: metrics and graders could not tell the two apart."""
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"sources are named {twice} more than once; every source needs a name of its own")
