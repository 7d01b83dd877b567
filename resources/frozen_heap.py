"""What a process has loaded when its work begins is passed over by the garbage collections that follow.

A full collection looks at every object there is. With torch, transformers and Prefect imported it takes 0.16 to 0.3 s,
in the middle of whatever the process does then; of what came since, it takes milliseconds.
"""

import contextlib
import gc
from collections.abc import Iterator


def freeze_heap() -> None:
    """For a process that lives as long as what it has loaded."""
    gc.freeze()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """For a process that may do other work afterwards: inside the block alone."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
