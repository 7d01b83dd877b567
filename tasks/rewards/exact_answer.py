"""Answers compared character by character: for tasks whose answer has one spelling."""

from collections.abc import Mapping

from tasks.rewards.score import Score

NO_ANSWER = "the answer of this row is empty"


def exact_answer(
    prompt: str, response: str, answer: str, extra: Mapping[str, object], *, ignore_case: bool = False
) -> Score:
    """1 when the response is the answer, apart from white space around it; else 0. Unscorable when the answer is empty.

    >>> exact_answer("53172=", " 12357\\n", "12357", {}).value
    1.0
    """
    got, expected = response.strip(), answer.strip()
    if not expected:
        return Score(None, NO_ANSWER)
    if ignore_case:
        got, expected = got.casefold(), expected.casefold()
    return Score(float(got == expected))


def positions_right(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """Share of the answer's characters that stand in their place; characters too many count as wrong places.

    Unscorable when the answer is empty. A graded signal for tasks such as sorting digits, where a policy that starts
    from nothing seldom gets all right.

    >>> positions_right("53172=", "12375", "12357", {}).value
    0.6
    """
    got, expected = response.strip(), answer.strip()
    if not expected:
        return Score(None, NO_ANSWER)
    right = sum(mine == theirs for mine, theirs in zip(got, expected, strict=False))
    return Score(right / max(len(got), len(expected)))
