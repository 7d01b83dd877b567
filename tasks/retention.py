"""Keep the Prefect database small: iterations beyond the newest ones lose their task rows, not their own row.

What is lost in the UI stays in the run folder: role timings in spans.jsonl, metrics in metrics.jsonl.
"""

from collections import deque
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.exceptions import ObjectNotFound

from tasks.ui_writer import UiWriter

PAGE = 200
"""Rows a page; Prefect's maximum."""


class Retention:
    """Prunes iteration subflows in the order they ended."""

    def __init__(self, writer: UiWriter, keep_iterations: int) -> None:
        self._writer = writer
        self._keep = keep_iterations
        self._ended: deque[UUID] = deque()
        self.num_pruned = 0
        """Task rows deleted so far."""

    def ended(self, flow_run_id: UUID) -> None:
        """An iteration's subflow ended; the oldest beyond `keep_iterations` is pruned in the background."""
        self._ended.append(flow_run_id)
        while len(self._ended) > self._keep:
            old = self._ended.popleft()
            self._writer.put(f"prune-{old}", partial(self._prune, old))

    def _prune(self, flow_run_id: UUID, client: SyncPrefectClient) -> None:
        self.num_pruned += delete_task_rows(client, flow_run_id)


def delete_task_rows(client: SyncPrefectClient, flow_run_id: UUID) -> int:
    """Delete the task rows of one flow run; returns how many there were."""
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    deleted = 0
    while page := client.read_task_runs(flow_run_filter=chosen, limit=PAGE):
        for row in page:
            try:
                client.delete_task_run(row.id)
            except ObjectNotFound:  # somebody deleted it in the UI
                continue
            deleted += 1
    return deleted
