"""The verifiers that come with reasoning-gym's data sets."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tasks.rewards.score import Score


@cache
def _verifier(dataset: str) -> Any:  # reasoning-gym's annotation, Callable[[], float], is not what it returns
    import reasoning_gym  # several seconds to import, so only where it is used

    return reasoning_gym.get_score_answer_fn(dataset)


def reasoning_gym_answer(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """The data set's own score of the last `<answer>...</answer>`, or of the whole response when it has none.

    Reads `extra["dataset"]`, the name of the data set, and `extra["entry"]`, the row as reasoning-gym made it.

    Raises:
        ValueError: a row that does not come from a reasoning-gym source.
    """
    dataset, entry = extra.get("dataset"), extra.get("entry")
    if not isinstance(dataset, str) or not isinstance(entry, dict):
        raise ValueError(
            f"extra has keys {sorted(extra)}; reasoning_gym_answer needs 'dataset' and 'entry' of such a source"
        )
    opening, closing = "<answer>", "</answer>"
    start, end = response.rfind(opening), response.rfind(closing)
    given = response[start + len(opening) : end] if 0 <= start < end else response
    return Score(float(_verifier(dataset)(given.strip(), entry)))
