"""One background thread for what only the Prefect UI needs: the training never waits for it and never fails with it."""

import contextvars
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.logging import get_logger

Write = Callable[[SyncPrefectClient], None]


class UiWriter:
    """Does writes in order; a newer write of the same key replaces one that still waits."""

    def __init__(self, every_seconds: float = 2.0, after_seconds: float = 0.5) -> None:
        """When to write.

        Args:
            every_seconds: pause between two rounds of writes, which bounds what the UI costs the machine.
            after_seconds: pause before each round. An iteration puts its writes just before the next subflow is
                opened, and SQLite refuses one of two writers that meet.
        """
        self._every, self._after = every_seconds, after_seconds
        self._waiting: OrderedDict[str, Write] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = False
        self.num_failed = 0
        """Writes that the API refused or did not answer; the UI then shows older values."""
        # The thread needs the settings of the flow, the API's address above all.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="ui-writer", daemon=True)
        self._thread.start()

    def put(self, key: str, write: Write) -> None:
        """Do `write` soon, instead of an earlier one of the same key that has not been done."""
        with self._changed:
            self._waiting.pop(key, None)
            self._waiting[key] = write
            self._changed.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Do what waits, then end; gives up after `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def __enter__(self) -> "UiWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self._changed.wait_for(lambda: self._closing, timeout=self._after)
                batch, self._waiting = self._waiting, OrderedDict()
                if not batch and self._closing:
                    return
            self._do(list(batch.values()))
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=self._every)

    def _do(self, writes: list[Write]) -> None:
        try:
            with get_client(sync_client=True) as client:
                for write in writes:
                    self._do_one(client, write)
        except (httpx.HTTPError, PrefectException) as error:
            self._failed(error)

    def _do_one(self, client: SyncPrefectClient, write: Write) -> None:
        try:
            write(client)
        except (httpx.HTTPError, PrefectException) as error:
            self._failed(error)
            time.sleep(0.1)

    def _failed(self, error: Exception) -> None:
        if self.num_failed == 0:
            get_logger("callsheet").warning("the Prefect UI is not up to date: %s", error)
        self.num_failed += 1
