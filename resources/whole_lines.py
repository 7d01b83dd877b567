"""Appends lines to a file so that each is there whole or not at all, whatever the disk or the process before left."""

import os
import threading
from pathlib import Path

_LOCK = threading.Lock()
"""Between its threads; among processes a run's files have one writer, who holds the run's lock."""


def append_lines(path: Path, lines: str, *, is_synced: bool) -> None:
    """Add text that ends in a newline; `is_synced`: have it on the disk before returning.

    A last line that was cut off before is closed first, so that it swallows nothing. Raises OSError with the file as
    it was.
    """
    with _LOCK:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _append(descriptor, lines.encode(), is_synced)
        finally:
            os.close(descriptor)


def _append(descriptor: int, added: bytes, is_synced: bool) -> None:
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        added = b"\n" + added
    is_whole = False
    try:
        left = memoryview(added)
        while left:  # a disk that fills up takes a part and says so only at the next write
            left = left[os.write(descriptor, left) :]
        if is_synced:
            os.fsync(descriptor)
        is_whole = True
    finally:
        if not is_whole:
            os.ftruncate(descriptor, size)
