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
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    is_published = False
    try:
        yield staging
        for weights in staging.glob("*.safetensors"):
            weights.chmod(staging.stat().st_mode & 0o666)
        _publish(staging, folder)
        is_published = True
    finally:
        if not is_published:
            shutil.rmtree(staging)


def _publish(staging: Path, folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # what it led to stays
    if not folder.exists():
        os.rename(staging, folder)
        return
    older = folder.with_name(f"{staging.name}-older")
    shutil.rmtree(older, ignore_errors=True)  # of a process of the same number that was killed here
    os.rename(folder, older)
    try:
        os.rename(staging, folder)
    except OSError:
        os.rename(older, folder)
        raise
    shutil.rmtree(older)
