"""The rollout's side of streaming: finished responses go to the reward worker of their group; nobody waits."""

from collections.abc import Sequence

from resources.failures import WorkerFailed
from resources.graders import FinishedRow, owner_of
from resources.worker_group import WorkerGroup


class RewardStream:
    """Sends the rows of one batch to a reward worker group; can be pickled and called from any process.

    Streaming is only an early start: a row that never arrives is graded by the `reward` step, which also tells a
    failure of the group. So nothing is raised here and nothing is waited for.
    """

    def __init__(self, group: WorkerGroup, batch_id: str) -> None:
        """`batch_id`: the one the `reward` step will ask for."""
        self._group = group
        self._batch_id = batch_id
        self._is_open = True

    def __call__(self, rows: Sequence[FinishedRow]) -> None:
        """Hand over responses as they finish, a few at a time."""
        if not rows or not self._is_open:
            return
        parts: list[list[FinishedRow]] = [[] for _ in range(self._group.world_size)]
        for row in rows:
            parts[owner_of(row.group_id, self._group.world_size)].append(row)
        try:
            self._group.submit("begin", self._batch_id, parts)
        except WorkerFailed:
            self._is_open = False
