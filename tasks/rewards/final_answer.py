"""What a response says in the end, in one spelling: so that samples which agree can be counted together."""

from tasks.rewards.boxed import last_boxed
from tasks.rewards.numeric_answer import extract_numbers


def final_answer(response: str) -> str:
    """The numbers of the final answer; else the content of the last box; else the whole text without outer space.

    >>> final_answer("so it is $1,000."), final_answer(r"\\boxed{x + 1}"), final_answer(" yes ")
    ('1000', 'x + 1', 'yes')
    """
    numbers = extract_numbers(response)
    if numbers:
        return ", ".join(str(number) for number in numbers)
    boxed = last_boxed(response)
    return (response if boxed is None else boxed).strip()
