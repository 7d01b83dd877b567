"""The reward of the comparison with TRL: a plain function that both sides import."""


def digit_share(response: str) -> float:
    """The share of digits among the characters of `response`: dense, and learnt within a few steps.

    >>> digit_share("12 a")
    0.5
    """
    return sum(character.isdigit() for character in response) / max(1, len(response))
