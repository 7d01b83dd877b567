"""A look at a run's prompts before anything starts: sizes, lengths, what would be cut or filtered, duplicates.

Works on the tokenizer and the files alone; no model is loaded.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig, SourceConfig, ValidationConfig
from resources.prompt_sources import SourceRow
from resources.prompts import PromptSource

NO_LIMIT = 10**9
MOST_LISTED = 20
QUANTILES = (0.0, 0.5, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True)
class RenderedSample:
    """One row as the model sees it."""

    index: int
    text: str
    """The token ids decoded again, special tokens included."""
    tokens: int
    answer: str


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """What a source holds."""

    name: str
    part: str
    """`training` or `validation`."""
    rows: int
    prompt_tokens: Mapping[str, int]
    """Smallest, median, 95 % and largest, before any limit."""
    answer_tokens: Mapping[str, int]
    without_answer: int
    overlong: int
    """Rows above data.max_prompt_length: filtered, cut, or an error, as data.overlong_prompts says."""
    overlong_rows: Sequence[int]
    unknown: int
    """Rows that hold characters for which the tokenizer has no token."""
    duplicates: int
    """Rows whose prompt stands earlier in the same source."""
    duplicate_rows: Sequence[int]
    also_in_training: int
    """Of a validation source: rows whose prompt is a training prompt too."""
    share: float
    """Of the prompts of an iteration."""
    group_size: int
    samples: Sequence[RenderedSample]


@dataclass(frozen=True, kw_only=True)
class PromptReport:
    """All sources of a config."""

    sources: Sequence[SourceReport]
    rows_of_an_epoch: int
    """After filtering."""
    prompts_per_iteration: int
    overlong_prompts: str
    max_prompt_length: int
    problems: Sequence[str]
    """In words, for whoever decides whether to start."""
    stops: bool
    """Whether a run would refuse these prompts."""

    def to_json(self) -> dict[str, Any]:
        """For `callsheet data --json`."""
        return asdict(self)


def report_prompts(
    data: DataConfig,
    validation: ValidationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    group_size: int,
    num_samples: int = 2,
    tools: Sequence[dict[str, Any]] = (),
) -> PromptReport:
    """Read and render every source; `tools` are the schemas that a chat template tells of.

    Raises PromptError for rows that no run could use.
    """
    whole = data.model_copy(update={"max_prompt_length": NO_LIMIT, "overlong_prompts": "truncate_right"})
    sources = PromptSource(whole.model_copy(update={"prompts_per_iteration": 1}), tokenizer, tools=tools).rendered
    weights = sum(source.weight for source, _, _ in sources)
    known = {_key(row) for _, rows, _ in sources for row in rows}
    found = [
        _report(part, tokenizer, data, "training", (), part[0].weight / weights, group_size, num_samples)
        for part in sources
    ]
    if validation.sources:
        few = validation.model_copy(update={"num_prompts": 1})
        held_out = PromptSource.for_validation(few, whole, tokenizer, tools).rendered
        weights = sum(source.weight for source, _, _ in held_out)
        found += [
            _report(part, tokenizer, data, "validation", known, part[0].weight / weights, 1, num_samples)
            for part in held_out
        ]
    left = _rows_left(found, data, "training")
    lengths = [] if data.overlong_prompts == "error" else _overlong(found, data)
    stopping = _shortages(found, data, validation, left)
    return PromptReport(
        sources=found,
        rows_of_an_epoch=left,
        prompts_per_iteration=data.prompts_per_iteration,
        overlong_prompts=data.overlong_prompts,
        max_prompt_length=data.max_prompt_length,
        problems=[*lengths, *_problems(found), *stopping],
        stops=bool(stopping),
    )


def _report(
    part: tuple[SourceConfig, list[SourceRow], list[tuple[int, ...]]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    name: str,
    elsewhere: "set[str] | tuple[()]",
    share: float,
    group_size: int,
    num_samples: int,
) -> SourceReport:
    source, rows, all_ids = part
    lengths = [len(ids) for ids in all_ids]
    answers = tokenizer([row.answer for row in rows], add_special_tokens=False)["input_ids"]
    long = [row.index for row, length in zip(rows, lengths, strict=True) if length > data.max_prompt_length]
    seen: Counter[str] = Counter()
    twice: list[int] = []
    for row in rows:
        key = _key(row)
        seen[key] += 1
        if seen[key] > 1:
            twice.append(row.index)
    step = max(1, len(rows) // max(1, num_samples))
    return SourceReport(
        name=source.name,
        part=name,
        rows=len(rows),
        prompt_tokens=_quantiles(lengths),
        answer_tokens=_quantiles([len(ids) for ids in answers]),
        without_answer=sum(not row.answer.strip() for row in rows),
        overlong=len(long),
        overlong_rows=long[:MOST_LISTED],
        unknown=sum(tokenizer.unk_token_id in ids for ids in all_ids) if tokenizer.unk_token_id is not None else 0,
        duplicates=len(twice),
        duplicate_rows=twice[:MOST_LISTED],
        also_in_training=sum(_key(row) in elsewhere for row in rows),
        share=share,
        group_size=source.group_size or group_size,
        samples=[
            RenderedSample(index=row.index, text=str(tokenizer.decode(list(ids))), tokens=len(ids), answer=row.answer)
            for row, ids in list(zip(rows, all_ids, strict=True))[::step][:num_samples]
        ],
    )


def _quantiles(numbers: Sequence[int]) -> dict[str, int]:
    ordered = sorted(numbers)
    return {f"{100 * q:g}%": ordered[round(q * (len(ordered) - 1))] for q in QUANTILES}


def _key(row: SourceRow) -> str:
    return row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True)


def _problems(found: Sequence[SourceReport]) -> list[str]:
    said: list[str] = []
    for one in found:
        if one.unknown:
            said.append(f"{one.name}: {one.unknown} prompts hold characters that the tokenizer does not know")
        if one.duplicates:
            said.append(
                f"{one.name}: {one.duplicates} prompts stand more than once, for example row {one.duplicate_rows[0]}"
            )
        if one.without_answer:
            said.append(f"{one.name}: {one.without_answer} rows have no answer; graders that compare cannot score them")
        if one.also_in_training:
            said.append(f"{one.name}: {one.also_in_training} held-out prompts are training prompts too")
    return said


def _overlong(found: Sequence[SourceReport], data: DataConfig) -> list[str]:
    what = {"filter": "would be filtered out", "error": "would stop the run"}
    fate = what.get(data.overlong_prompts, "would be cut")
    return [
        f"{one.name}: {one.overlong} of {one.rows} prompts are longer than {data.max_prompt_length} tokens and {fate}"
        for one in found
        if one.overlong
    ]


def _shortages(found: Sequence[SourceReport], data: DataConfig, validation: ValidationConfig, left: int) -> list[str]:
    """What would end a run at its start."""
    said = _overlong(found, data) if data.overlong_prompts == "error" else []
    if left < data.prompts_per_iteration:
        said.append(
            f"{left} training prompts are left, fewer than data.prompts_per_iteration = {data.prompts_per_iteration}"
        )
    held_out = _rows_left(found, data, "validation")
    if validation.sources and held_out < validation.num_prompts:
        said.append(
            f"{held_out} held-out prompts are left, fewer than validation.num_prompts = {validation.num_prompts}"
        )
    return said


def _rows_left(found: Sequence[SourceReport], data: DataConfig, part: str) -> int:
    is_filtered = data.overlong_prompts == "filter"
    return sum(one.rows - (one.overlong if is_filtered else 0) for one in found if one.part == part)
