"""Which rows share a forward pass, and which data-parallel rank they go to. Pure arithmetic on lengths.

Rows of similar length go together, so that padding to the longest of a micro-batch wastes little. Nothing is
reordered: what comes out are positions, and the rows keep their ids.
"""

from collections.abc import Sequence


def split_by_count(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Positions in micro-batches of at most `size` rows, longest rows first.

    >>> split_by_count([3, 9, 4], 2)
    [[1, 2], [0]]
    """
    if size < 1:
        raise ValueError(f"micro_batch_size is {size}; a micro-batch holds at least 1 row")
    order = longest_first(lengths)
    return [order[start : start + size] for start in range(0, len(order), size)]


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions in micro-batches whose *padded* size, rows x longest row, stays within `budget`; longest rows first.

    A row longer than the budget goes alone: it cannot be cut, and leaving it out would bias the batch.

    >>> split_by_tokens([3, 9, 4, 3, 12], 10)
    [[4], [1], [2, 0], [3]]
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens is {budget}; a micro-batch holds at least 1 token")
    batches: list[list[int]] = []
    for position in longest_first(lengths):
        if batches and (len(batches[-1]) + 1) * max(1, lengths[batches[-1][0]]) <= budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


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


def fill_fraction(lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> float:
    """Real tokens over padded tokens; 1.0 for no tokens at all."""
    real = sum(lengths[position] for batch in micro_batches for position in batch)
    padded = sum(len(batch) * max(lengths[position] for position in batch) for batch in micro_batches if batch)
    return real / padded if padded else 1.0
