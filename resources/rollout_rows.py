"""From prompts to generation requests, and from what engines sampled to rows of a batch.

Row ids: `ordinal * stride + k` for the k-th response to the prompt at position `ordinal` of the run, with `stride` the
largest group of any source. They depend on nothing but the data position, so a replay gives the same rows, and no two
iterations share one. Greedy baseline rows are `-1 - ordinal`. The group id is the ordinal.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from resources.batch import make_shard, ragged_from_rows, ragged_from_values
from resources.engines.base import FinishReason, GenerationOutput, GenerationRequest
from resources.graders import FinishedRow
from resources.prompts import Prompt
from resources.seeding import row_seed

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """One response to sample, and the prompt it answers."""

    row_id: int
    prompt: Prompt
    group_size: int

    @property
    def group_id(self) -> int:
        """Siblings share it."""
        return self.prompt.ordinal


def rows_of(prompts: Sequence[Prompt], group_size: int, stride: int) -> list[RolloutRow]:
    """Group by group, siblings side by side: prompts [0, 1] with two responses each give groups [0, 0, 1, 1]."""
    rows: list[RolloutRow] = []
    for prompt in prompts:
        size = prompt.group_size or group_size
        if size > stride:
            raise ValueError(f"source {prompt.source!r} asks for {size} responses but row ids have room for {stride}")
        rows += [RolloutRow(row_id=prompt.ordinal * stride + k, prompt=prompt, group_size=size) for k in range(size)]
    return rows


def greedy_rows(prompts: Sequence[Prompt]) -> list[RolloutRow]:
    """One row a prompt, for a greedy baseline."""
    return [RolloutRow(row_id=-1 - prompt.ordinal, prompt=prompt, group_size=1) for prompt in prompts]


def requests_of(rows: Sequence[RolloutRow], run_seed: int, iteration: int, max_tokens: int) -> list[GenerationRequest]:
    """One request a row, with the row's own seed."""
    return [
        GenerationRequest(
            row_id=row.row_id,
            prompt_ids=row.prompt.ids,
            seed=row_seed(run_seed, iteration, row.row_id),
            max_tokens=max_tokens,
            answer=row.prompt.answer,
            prompt_index=row.prompt.index,
        )
        for row in rows
    ]


def shard_of(
    rows: Sequence[RolloutRow],
    outputs: Sequence[GenerationOutput],
    policy_version: int,
    *,
    masks: Sequence[Sequence[bool]] | None = None,
    row_records: Sequence[bytes] | None = None,
) -> TensorDict:
    """The columns a rollout writes, one row an output. Log-probs are 0 on the prompt.

    `masks`: which tokens after the prompt the policy sampled, where not all of them. `row_records`: in place of the
    prompts' own.
    """
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    records: list[bytes] = []
    for place, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        prompt = row.prompt.ids
        ids += [*prompt, *output.token_ids]
        mask += [False] * len(prompt) + ([True] * len(output.token_ids) if masks is None else list(masks[place]))
        log_probs += [0.0] * len(prompt) + list(output.log_probs)
        records.append(row.prompt.record() if row_records is None else row_records[place])
    prompt_lengths = torch.tensor([len(row.prompt.ids) for row in rows], dtype=torch.int64)
    response_lengths = torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.int64)
    lengths = prompt_lengths + response_lengths
    raw = (
        torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8)
    )
    record_lengths = torch.tensor([len(record) for record in records], dtype=torch.int64)
    return make_shard(
        {
            "row_ids": torch.tensor([row.row_id for row in rows], dtype=torch.int64),
            "group_ids": torch.tensor([row.group_id for row in rows], dtype=torch.int64),
            "prompt_lengths": prompt_lengths,
            "response_lengths": response_lengths,
            "finish_reasons": torch.tensor([int(output.finish_reason) for output in outputs], dtype=torch.int8),
            "policy_versions": torch.full((len(rows),), policy_version, dtype=torch.int64),
            "record": ragged_from_values(raw, record_lengths),
            "input_ids": ragged_from_values(torch.tensor(ids, dtype=torch.int64), lengths),
            "response_mask": ragged_from_values(torch.tensor(mask, dtype=torch.bool), lengths),
            "rollout_log_probs": ragged_from_values(torch.tensor(log_probs, dtype=torch.float32), lengths),
        }
    )


def records_of(rows: TensorDictBase) -> list[dict[str, Any]]:
    """What the column `record` says of each row: prompt, answer, source, index, extra."""
    column = rows.get("record")
    raw, ends = bytes(column.values().numpy()), column.offsets().tolist()
    return [json.loads(raw[start:end]) for start, end in itertools.pairwise(ends)]


def finished_row(
    row: RolloutRow, output: GenerationOutput, *, record: bytes | None = None, length: int | None = None
) -> FinishedRow:
    """What a grader can start with before the batch is complete. `length`: with what tools answered."""
    return FinishedRow(
        row_id=row.row_id,
        group_id=row.group_id,
        record=row.prompt.record() if record is None else record,
        response_ids=output.token_ids,
        finish_reason=int(output.finish_reason),
        response_length=len(output.token_ids) if length is None else length,
        group_size=row.group_size,
    )


def token_versions_of(rows: Sequence[RolloutRow], versions: Sequence[Sequence[int]]) -> Tensor:
    """The column `token_versions` from the versions of tokens after the prompt; -1 on the prompt."""
    return ragged_from_rows(
        [torch.tensor([*([-1] * len(row.prompt.ids)), *own]) for row, own in zip(rows, versions, strict=True)],
        torch.int64,
    )


def oldest_versions(versions: Sequence[Sequence[int]], default: int) -> Tensor:
    """The column `policy_versions` where tokens of one row may differ: the oldest that sampled any of them.

    >>> oldest_versions([[4, -1, 3], []], 5).tolist()
    [3, 5]
    """
    oldest = [min((version for version in own if version >= 0), default=default) for own in versions]
    return torch.tensor(oldest, dtype=torch.int64)


def rollout_metrics(rows: Sequence[RolloutRow], outputs: Sequence[GenerationOutput]) -> Metrics:
    """Sums and counts, over the responses as they are trained on."""
    count = float(len(rows))
    tokens = float(sum(len(output.token_ids) for output in outputs))
    log_prob_sum = float(sum(sum(output.log_probs) for output in outputs))
    reasons = [output.finish_reason for output in outputs]
    means = {
        "rollout/response_length_mean": (tokens, count),
        "rollout/prompt_length_mean": (float(sum(len(row.prompt.ids) for row in rows)), count),
        "rollout/truncated_fraction": (float(reasons.count(FinishReason.LENGTH)), count),
        "rollout/aborted_fraction": (float(reasons.count(FinishReason.ABORT)), count),
        "rollout/log_prob_mean": (log_prob_sum, tokens),
    }
    metrics: Metrics = {"rollout/tokens": tokens, "rollout/rows": count}
    for name, (total, number) in means.items():
        metrics[name] = total
        metrics[f"{name}/count"] = number
    if outputs:
        metrics["rollout/response_length/max"] = float(max(len(output.token_ids) for output in outputs))
    return metrics


def facts_of(rows: Sequence[RolloutRow], outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Per row, in row order: for reports and for the curriculum."""
    return {
        "row_ids": [row.row_id for row in rows],
        "group_ids": [row.group_id for row in rows],
        "prompt_keys": list(dict.fromkeys(row.prompt.key for row in rows)),
        "response_lengths": [len(output.token_ids) for output in outputs],
        "finish_seconds": [round(output.finish_seconds, 4) for output in outputs],
    }
