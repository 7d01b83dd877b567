"""What a person is told in words: a refusal once, without the traceback that Prefect would log besides."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_traceback(kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Inside the block Prefect's log of flow runs leaves out exceptions of these kinds; the caller tells them."""
    logger = logging.getLogger("prefect.flow_runs")

    def is_no_refusal(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, kinds)

    logger.addFilter(is_no_refusal)
    try:
        yield
    finally:
        logger.removeFilter(is_no_refusal)


def tell_ignored(problem: str) -> None:
    """A newer checkpoint than the one that is used has something wrong with it."""
    print(f"checkpoint ignored: {problem}", file=sys.stderr, flush=True)
