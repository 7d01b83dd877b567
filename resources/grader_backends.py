"""Which backend runs which kind of grader that is not a function in a grader process."""

from collections.abc import Sequence

from resources.code_grader import CodeBackend, CodeSettings
from resources.graders import Grader
from resources.judge import HttpBackend, HttpSettings, JudgeBackend, JudgeSettings
from resources.reward_loop import Backend


def build_backends(graders: Sequence[Grader], processes: int, rank: int = 0, world_size: int = 1) -> dict[str, Backend]:
    """Grader name -> backend, for kinds judge, http and sandbox, in reward worker `rank` of `world_size`.

    A service's limits are divided over the workers; `processes` boxes run at a time in each. Raises
    SandboxUnavailableError where boxes cannot be made, ValueError for a grader without the values of its kind.
    """
    return {
        grader.name: _build(grader, processes, rank, world_size)
        for grader in graders
        if grader.kind in ("judge", "http", "sandbox")
    }


def _build(grader: Grader, processes: int, rank: int, world_size: int) -> Backend:
    settings = grader.backend
    if isinstance(settings, JudgeSettings):
        return JudgeBackend(settings, rank, world_size)
    if isinstance(settings, HttpSettings):
        return HttpBackend(settings, settings.url, rank, world_size)
    if isinstance(settings, CodeSettings):
        return CodeBackend(settings, processes)
    raise ValueError(f"grader {grader.name!r} is of kind {grader.kind} and its backend is a {type(settings).__name__}")
