"""What each rank does in an update: its rows, cut into mini-batches and micro-batches, and the global counts.

Made once for all ranks from lengths alone, so every rank runs the same number of forward passes and no rank waits
in a collective for one that has finished. A rank with fewer rows gets empty micro-batches.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resources.micro_batches import Siblings, balance_over_ranks, split_rows
from resources.seeding import stream_seed

RATIO_TOLERANCE = {"float32": 5e-5, "bfloat16": 0.02}
"""Largest |log_probs - old_log_probs| / (1 + |old_log_probs|) before the first optimizer step; for bfloat16 the mean
of |log_probs - old_log_probs|.

Relative, since rounding grows with the log-prob. SmolLM2-135M scored in micro-batches of 1 and of 6 rows differs by up
to 7.6e-6, with prompts shared and apart by 4.9e-6 (log-probs down to -26), and a larger model by more; a shift by one
token, another temperature or other weights differ by whole units."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One optimizer step, as one rank sees it."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Row ids of this rank, a tuple a forward pass; () is a pass that only keeps collectives in step."""
    num_response_tokens: int
    """Trained tokens of the mini-batch over all ranks: the divisor of token means."""
    num_sequences: int
    """Rows with a trained token, over all ranks: the divisor of sequence means."""
    epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """The optimizer steps of one update call, for one data-parallel rank.

    Worked example: rows 10 to 14 with 4, 1, 0, 2, 3 trained tokens, two ranks, one mini-batch, micro-batches of one
    row. Row 12 has nothing to train and is left out; both ranks make two passes; the counts are 10 tokens, 4 rows.

    >>> plans = make_update_plans([10, 11, 12, 13, 14], [6, 3, 4, 5, 5], [4, 1, 0, 2, 3], dp_size=2, micro_batch_size=1)
    >>> [plan.mini_batches[0].micro_batches for plan in plans]
    [((10,), (11,)), ((13,), (14,))]
    >>> plans[0].mini_batches[0].num_response_tokens, plans[1].mini_batches[0].num_sequences, plans[0].num_masked_rows
    (10, 4, 1)
    """

    mini_batches: tuple[MiniBatch, ...]
    target_kl: float | None = None
    """Stop before the first step whose policy moved further than this (approximate KL per token)."""
    num_masked_rows: int = 0
    """Real rows, of all ranks, that have no trained token and therefore take no part."""
    first_ratio_tolerance: float | None = None
    """Checked before the first optimizer step, see RATIO_TOLERANCE; None where old_log_probs came from elsewhere."""

    @property
    def row_ids(self) -> tuple[int, ...]:
        """The rows this rank needs, ascending, each once."""
        return tuple(sorted({row for mini in self.mini_batches for micro in mini.micro_batches for row in micro}))

    def in_parts(self, steps: int) -> list["UpdatePlan"]:
        """The same optimizer steps as several calls of at most `steps` each; what counts once stands in the first.

        >>> [plan] = make_update_plans([1, 2, 3], [5, 5, 5], [1, 0, 1], num_mini_batches=2)
        >>> [(len(part.mini_batches), part.num_masked_rows) for part in plan.in_parts(1)]
        [(1, 1), (1, 0)]
        """
        minis = self.mini_batches
        cut = [minis[start : start + steps] for start in range(0, len(minis), steps)] or [minis]
        first = replace(self, mini_batches=cut[0])
        rest = replace(self, num_masked_rows=0, first_ratio_tolerance=None)
        return [first, *(replace(rest, mini_batches=part) for part in cut[1:])]


def make_update_plans(
    row_ids: Sequence[int],
    lengths: Sequence[int],
    trained_tokens: Sequence[int],
    *,
    dp_size: int = 1,
    num_mini_batches: int = 1,
    num_ppo_epochs: int = 1,
    micro_batch_size: int = 8,
    micro_batch_tokens: int | None = None,
    siblings: Siblings | None = None,
    seed: int = 0,
    iteration: int = 0,
    shuffle: bool = True,
    target_kl: float | None = None,
    first_ratio_tolerance: float | None = None,
) -> list[UpdatePlan]:
    """One plan per data-parallel rank.

    Args:
        row_ids: of the rollout batch.
        lengths: tokens of each row, prompt and response: what a forward pass costs.
        trained_tokens: true positions of each row's training mask; rows with 0 are left out and counted.
        dp_size: data-parallel ranks; tensor- and sequence-parallel peers share a plan.
        num_mini_batches: optimizer steps an epoch; sizes differ by at most one row, and there are never empty ones.
        num_ppo_epochs: passes over the rows.
        micro_batch_size: rows of a forward pass, unless `micro_batch_tokens` gives a budget of padded tokens.
        siblings: of rows whose passes read a prompt once; those of a micro-batch are chosen for it.
        seed, iteration: the order of an epoch is a function of (seed, iteration, epoch) alone.
        shuffle: False keeps the order given (supervised data with an order of its own).
        target_kl, first_ratio_tolerance: see UpdatePlan.
    """
    if not len(row_ids) == len(lengths) == len(trained_tokens):
        raise ValueError(
            f"{len(row_ids)} row ids, {len(lengths)} lengths and {len(trained_tokens)} counts; give one of each a row"
        )
    rows = [position for position, count in enumerate(trained_tokens) if count > 0]
    steps: list[list[MiniBatch]] = [[] for _ in range(dp_size)]
    for epoch in range(num_ppo_epochs):
        order = list(rows)
        if shuffle:
            random.Random(stream_seed(seed, f"update-{iteration}", epoch)).shuffle(order)
        for part in _even_parts(order, num_mini_batches):
            micro = _micro_batches(part, lengths, dp_size, micro_batch_size, micro_batch_tokens, siblings)
            for rank in range(dp_size):
                steps[rank].append(
                    MiniBatch(
                        micro_batches=tuple(tuple(row_ids[position] for position in batch) for batch in micro[rank]),
                        num_response_tokens=sum(trained_tokens[position] for position in part),
                        num_sequences=len(part),
                        epoch=epoch,
                    )
                )
    return [
        UpdatePlan(
            mini_batches=tuple(steps[rank]),
            target_kl=target_kl,
            num_masked_rows=len(row_ids) - len(rows),
            first_ratio_tolerance=first_ratio_tolerance,
        )
        for rank in range(dp_size)
    ]


def _even_parts(order: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one; fewer parts when there are fewer rows."""
    parts = min(parts, len(order))
    edges = [len(order) * index // parts for index in range(parts + 1)] if parts else [0]
    return [order[start:stop] for start, stop in itertools.pairwise(edges)]


def _micro_batches(
    part: list[int], lengths: Sequence[int], dp_size: int, size: int, budget: int | None, siblings: Siblings | None
) -> list[list[list[int]]]:
    """Positions per rank and micro-batch; every rank has as many micro-batches as the busiest."""
    chosen = sorted(part)
    shares = balance_over_ranks([lengths[position] for position in chosen], dp_size)
    per_rank: list[list[list[int]]] = []
    for share in shares:
        own = [chosen[index] for index in share]
        own_lengths = [lengths[position] for position in own]
        split = split_rows(own_lengths, size, budget, siblings.of(own) if siblings is not None else None)
        per_rank.append([[own[index] for index in batch] for batch in split])
    busiest = max(len(batches) for batches in per_rank)
    return [batches + [[] for _ in range(busiest - len(batches))] for batches in per_rank]
