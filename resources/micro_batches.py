"""Which rows share a forward pass, and which data-parallel rank they go to. Pure arithmetic on lengths.

Rows of similar length go together, so that padding to the longest of a micro-batch wastes little. Nothing is
reordered: what comes out are positions, and the rows keep their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Siblings:
    """Which rows answer the same prompt, and how long it is, row by row: what a pass that reads prompts once saves."""

    groups: Sequence[int]
    prompts: Sequence[int]
    """Tokens."""

    def of(self, positions: Sequence[int]) -> "Siblings":
        """The same of some rows."""
        return Siblings(
            groups=[self.groups[position] for position in positions],
            prompts=[self.prompts[position] for position in positions],
        )

    def tokens_read(self, lengths: Sequence[int], batch: Sequence[int]) -> int:
        """Tokens of a pass that reads each prompt once and no padding.

        >>> Siblings(groups=[7, 7, 8], prompts=[4, 4, 3]).tokens_read([6, 9, 5], [0, 1, 2])
        16
        """
        prompts = {self.groups[position]: self.prompts[position] for position in batch}
        return sum(prompts.values()) + sum(lengths[position] - self.prompts[position] for position in batch)


def split_rows(
    lengths: Sequence[int], size: int, budget: int | None, siblings: Siblings | None = None
) -> list[list[int]]:
    """Positions in micro-batches of at most `size` rows, or where it is given of `budget` tokens, rows x longest.

    Longest rows come first. A row longer than the budget goes alone: it cannot be cut, and leaving it out would bias
    the batch. With `siblings`, those of a group follow each other where passes that read a prompt once are shorter so.

    >>> split_rows([3, 9, 4], 2, None)
    [[1, 2], [0]]
    >>> split_rows([3, 9, 4, 3, 12], 1, 10)
    [[4], [1], [2, 0], [3]]
    >>> split_rows([9, 9, 5, 5], 2, None, Siblings(groups=[0, 1, 0, 1], prompts=[4, 4, 4, 4]))
    [[0, 2], [1, 3]]
    """
    if min(size, size if budget is None else budget) < 1:
        raise ValueError(f"micro-batches of {size} rows or {budget} tokens hold nothing; at least 1")

    def split(order: Sequence[int]) -> list[list[int]]:
        return _by_count(order, size) if budget is None else _by_tokens(order, lengths, budget)

    by_length = split(longest_first(lengths))
    if siblings is None:
        return by_length
    together = split(_groups_first(lengths, siblings.groups))
    ways = (by_length, together)
    return min(ways, key=lambda way: sum(_tokens(lengths, batch, siblings) for batch in way))


def _tokens(lengths: Sequence[int], batch: Sequence[int], siblings: Siblings) -> int:
    return min(len(batch) * max(lengths[position] for position in batch), siblings.tokens_read(lengths, batch))


def _by_count(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def _by_tokens(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for position in order:
        longest = max(1, longest, lengths[position])
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(position)
        else:
            batches.append([position])
            longest = lengths[position]
    return batches


def _groups_first(lengths: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Positions group after group, the one with the longest row first; in a group by falling length."""
    longest: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    return sorted(range(len(lengths)), key=lambda row: (-longest[groups[row]], groups[row], -lengths[row]))


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Positions by falling length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda position: -lengths[position])


def balance_over_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Positions for each rank so that tokens are nearly even: the longest row left goes to the rank with least.

    The largest load is at most 4/3 of the best possible one (Graham 1969). A rank may get nothing. Positions of a
    rank ascend.

    >>> balance_over_ranks([7, 1, 5, 2], 2)
    [[0, 1], [2, 3]]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; rows go to at least 1 rank")
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in longest_first(lengths):
        # Among equal loads the rank with fewer rows: empty rows would otherwise pile up on one.
        rank = min(range(num_ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(position)
        loads[rank] += lengths[position]
    return [sorted(share) for share in shares]
