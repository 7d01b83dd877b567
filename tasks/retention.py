"""Keep the Prefect database small: iterations beyond the newest ones lose their page, many in one request.

What is lost in the UI stays in the run folder: role timings in spans.jsonl, metrics in metrics.jsonl. Deleting row by
row would put ten write transactions an iteration in the way of the iterations' own, and double their cost.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.ui_writer import UiWriter

CHUNK = 50
"""Iterations deleted by one request: the most that Prefect takes."""


class Retention:
    """Prunes iteration subflows in the order they ended."""

    def __init__(self, writer: UiWriter, keep_iterations: int, chunk: int = CHUNK) -> None:
        self._writer = writer
        self._keep = keep_iterations
        self._chunk = chunk
        self._ended: deque[UUID] = deque()
        self.num_pruned = 0
        """Iterations deleted so far."""

    def ended(self, flow_run_id: UUID) -> None:
        """An iteration's subflow ended; when a chunk has gathered beyond `keep_iterations`, the oldest chunk goes."""
        self._ended.append(flow_run_id)
        if len(self._ended) >= self._keep + self._chunk:
            oldest = [self._ended.popleft() for _ in range(self._chunk)]
            self._writer.put(f"prune-{oldest[0]}", partial(self._prune, oldest))

    def _prune(self, flow_run_ids: Sequence[UUID], client: SyncPrefectClient) -> None:
        self.num_pruned += delete_iterations(client, flow_run_ids)


def delete_iterations(client: SyncPrefectClient, flow_run_ids: Sequence[UUID]) -> int:
    """Delete these flow runs (50 at most) with their task rows; returns how many there were."""
    chosen = {"flow_runs": {"id": {"any_": [str(one) for one in flow_run_ids]}}, "limit": len(flow_run_ids)}
    answer = client.request("POST", "/flow_runs/bulk_delete", json=chosen)  # pyright: ignore[reportArgumentType]
    return len(answer.json()["deleted"])
