"""Rewards that look at the length of a response alone."""

from collections.abc import Mapping

from tasks.rewards.score import Score


def overlong_penalty(
    prompt: str,
    response: str,
    answer: str,
    extra: Mapping[str, object],
    *,
    max_length: int | None = None,
    buffer: int | None = None,
    factor: float = 1.0,
) -> Score:
    """DAPO's soft over-long punishment, between 0 and -factor; without `max_length` there is none.

        0                               up to max_length - buffer tokens
        factor * (max - buffer - n)/b   inside the buffer
        -factor                         from max_length on

    Yu et al., arXiv 2503.14476, equation 13; `tasks.algorithms.token_rewards.overlong_penalty` is its tensor form.
    Reads `extra["response_length"]`, in tokens.

    >>> overlong_penalty("", "", "", {"response_length": 18}, max_length=20, buffer=5).value
    -0.6

    Raises:
        ValueError: a buffer that is not inside 1..max_length, or a row without its length.
    """
    if max_length is None:
        return Score(0.0)
    if buffer is None or not 1 <= buffer <= max_length:
        raise ValueError(f"over-long buffer is {buffer} and max_length {max_length}; it must lie in 1..max_length")
    length = extra.get("response_length")
    if not isinstance(length, int):
        raise ValueError(f"extra['response_length'] is {length!r}; the over-long penalty needs the length in tokens")
    return Score(factor * min(max((max_length - buffer - length) / buffer, -1.0), 0.0))
