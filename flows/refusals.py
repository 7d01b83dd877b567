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


@contextlib.contextmanager
def faults_told_once() -> Iterator[None]:
    """Inside the block the console leaves out what Prefect logs of an iteration that failed, traceback and end state.

    The recovery says in a line what happened, or the run's own end does; Prefect's UI still has the traceback.
    """
    handlers = [*logging.getLogger().handlers]  # where Prefect writes to the terminal
    for handler in handlers:
        handler.addFilter(_is_no_failed_iteration)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_failed_iteration)


def _is_no_failed_iteration(record: logging.LogRecord) -> bool:
    is_error_of_prefect = record.name == "prefect.flow_runs" and record.levelno >= logging.ERROR
    return not (is_error_of_prefect and getattr(record, "flow_name", None) == "iteration")


def tell_ignored(problem: str) -> None:
    """A newer checkpoint than the one that is used has something wrong with it."""
    print(f"checkpoint ignored: {problem}", file=sys.stderr, flush=True)
