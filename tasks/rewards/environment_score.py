"""The score that an environment, or an agent of the user's own, gave while the episode ran."""

from collections.abc import Mapping

from tasks.rewards.score import Score


def environment_score(prompt: str, response: str, answer: str, extra: Mapping[str, object]) -> Score:
    """What the row's environment said last, or its agent returned (`extra["environment_score"]`).

    Unscorable when the environment failed.

    >>> environment_score("", "", "", {"environment_score": 0.5}).value
    0.5

    Raises:
        ValueError: a row that met no environment, or whose agent returned no number.
    """
    if "environment_score" not in extra:
        raise ValueError(
            f"extra has keys {sorted(extra)}; environment_score needs rollout.tools.environment, which writes it, or a "
            "number that rollout.servers.agent returns"
        )
    score = extra["environment_score"]
    return Score(None, "the environment failed") if score is None else Score(float(score))  # pyright: ignore[reportArgumentType]
