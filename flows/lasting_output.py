"""A run outlives whoever reads what it says: a closed pipe, a lost terminal or a full disk costs lines alone."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

_NOBODY_READS = (errno.EPIPE, errno.EIO)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def lasting_stderr() -> Iterator[None]:
    """Inside the block writing to standard error raises nothing that is the reader's fault."""
    before = sys.stderr
    sys.stderr = cast("Any", _LastingStream(before))
    try:
        yield
    finally:
        sys.stderr = before


class _LastingStream:
    """A text stream; what cannot be written is lost, and after its reader is gone all of it is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does."""
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream does."""
        with self._surviving():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (*_NOBODY_READS, *_NO_ROOM):
                raise
            if error.errno in _NOBODY_READS:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
