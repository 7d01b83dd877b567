"""The rollout's side of streaming: finished responses go to the reward worker of their group; nobody waits."""

from collections.abc import Sequence

from resources.failures import WorkerFailed
from resources.graders import FinishedRow, owner_of
from resources.worker_group import WorkerGroup


class RewardStream:
    """Sends rows to a reward worker group; one per rollout worker.

    Streaming is only an early start: a row that never arrives is graded by the `reward` step, which also tells a
    failure of the group. So nothing is raised here and nothing is waited for.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._is_open = True

    def send(self, batch_id: str, rows: Sequence[FinishedRow]) -> None:
        """Hand over responses of batch `batch_id`; call it as often as responses finish."""
        if not rows or not self._is_open:
            return
        parts: list[list[FinishedRow]] = [[] for _ in range(self._group.world_size)]
        for row in rows:
            parts[owner_of(row.group_id, self._group.world_size)].append(row)
        try:
            self._group.submit("begin", batch_id, parts)
        except WorkerFailed:
            self._is_open = False
