"""A model folder that is there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def published_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into; at the block's end one rename makes it `folder`, and an older one is replaced.

    The older one steps aside whole and goes last: a process killed anywhere in between leaves no half of either.
    What the block leaves unfinished, by an exception, is removed. Weights become as readable as the files beside them:
    safetensors makes them their owner's alone.
    """
    staging = folder.with_name(f".{folder.name}-{os.getpid()}")
    staging.mkdir(parents=True)
    is_whole = False
    try:
        yield staging
        for weights in staging.glob("*.safetensors"):
            weights.chmod(staging.stat().st_mode & 0o666)
        is_whole = True
    finally:
        if not is_whole:
            shutil.rmtree(staging)
    if not folder.exists():
        os.rename(staging, folder)
        return
    older = folder.with_name(f"{staging.name}-older")
    os.rename(folder, older)
    try:
        os.rename(staging, folder)
    except OSError:
        os.rename(older, folder)
        raise
    shutil.rmtree(older)
