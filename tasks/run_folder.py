"""The folder of a run, new or to be resumed, with the config that counts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from prefect.logging import get_logger
from prefect.runtime import flow_run

from configs.load import dump_config, load_config
from configs.run import RunConfig
from resources.run_directory import CREATED, RunDirectory


@contextlib.contextmanager
def run_folder(config: RunConfig, resume: Path | None) -> Iterator[tuple[RunConfig, RunDirectory]]:
    """`open_directory`, and the lock given back at the end.

    A folder that was made here goes where the run ends before it has begun: the way out may be another config, and the
    folder would keep its name from that one. What somebody else has put into it stays, with all the rest.
    """
    config, directory = open_directory(config, resume)
    with contextlib.ExitStack() as stack:
        stack.callback(directory.release)
        if resume is None:
            stack.callback(_discard_unless_begun, directory)
        yield config, directory


def _discard_unless_begun(directory: RunDirectory) -> None:
    more = [] if directory.has_begun else directory.discard()
    if more:
        get_logger("callsheet").warning(
            "%s is of a run that has not begun, and stays: it holds %s; remove it before you use its name again",
            directory.path, ", ".join(more),
        )  # fmt: skip


def open_directory(config: RunConfig, resume: Path | None) -> tuple[RunConfig, RunDirectory]:
    """A new run folder for `config`, or the folder of the run to resume with the config stored there.

    Raises RunDirectoryError when a new run's folder exists, a resumed one's does not or has nothing to go on with, or
    another process holds it, and ConfigError when the stored config cannot be read.
    """
    if resume is None:
        directory = RunDirectory.create(Path(config.run_dir).absolute(), config.name)
        directory.event(CREATED, flow_run=flow_run.id)
        directory.write_config(dump_config(config))
        return config, directory
    directory = RunDirectory.open(resume.absolute())
    stored = load_config(directory.path / "config.yaml")
    directory.acquire()
    return stored, directory
