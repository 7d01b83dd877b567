"""The file of a run's spans, to which records are appended as they happen.

Cheap and always on: a task costs one line of JSON; the CPU time spent here is measured.
"""

import time
from pathlib import Path

from resources.telemetry.span_lines import encode
from resources.telemetry.spans import Record
from resources.whole_lines import append_lines

SPANS_FILE = "spans.jsonl"


class SpanFile:
    """Appends records to a file, each whole or not at all, so that a crash can only cut the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own_cpu_seconds = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, *records: Record) -> None:
        """Writes the records. Raises OSError when the disk refuses, with the file as it was."""
        cpu = time.thread_time()
        append_lines(self.path, "".join(encode(record) for record in records), is_synced=False)
        self.own_cpu_seconds += time.thread_time() - cpu
