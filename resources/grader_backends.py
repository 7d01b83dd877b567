"""Which backend runs which kind of grader that is not a function in a grader process."""

from collections.abc import Sequence

from resources.graders import Grader
from resources.reward_loop import Backend


def build_backends(graders: Sequence[Grader], processes: int, world_size: int) -> dict[str, Backend]:
    """Grader name -> backend, for kinds judge, http and sandbox.

    Limits of a judge are divided over the `world_size` reward workers; `processes` sandboxes run at a time in each.
    """
    return {}
