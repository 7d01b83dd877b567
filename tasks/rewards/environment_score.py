"""The score that an environment gave while the episode ran."""

from collections.abc import Mapping

from tasks.rewards.score import Score


def environment_score(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """What the row's environment said last (`extra["environment_score"]`); unscorable when it failed.

    >>> environment_score("", "", "", {"environment_score": 0.5}).value
    0.5

    Raises:
        ValueError: a row that met no environment.
    """
    if "environment_score" not in extra:
        raise ValueError(
            f"extra has keys {sorted(extra)}; environment_score needs rollout.tools.environment, which writes it"
        )
    score = extra["environment_score"]
    return Score(None, "the environment failed") if score is None else Score(float(score))  # pyright: ignore[reportArgumentType]
