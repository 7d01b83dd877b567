"""The folder of a run: what a person reads afterwards, and what a resume starts from.

RUNS/RUN_ID/config.yaml     resolved config        metrics.jsonl   one line an iteration
            spans.jsonl     one line a task        events.jsonl    faults, recoveries, saves
            samples/        rows with text         checkpoints/    see checkpoints.py
            logs/           a file a worker        lock            held by the process that runs it
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.yaml_reader import write_plain_yaml
from resources.whole_lines import append_lines

SIDE_RUN = "side-run"
"""The first event of a folder in which one thing was done alone: a fit, an evaluation. It has nothing to go on with."""


class RunDirectoryError(ValueError):
    """A run folder that exists, is missing, or is in use."""


class RunDirectory:
    """One run's folder. `metrics.jsonl` grows by whole lines only, and can be cut back to a committed length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The resolved config, which counts on a resume."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object an iteration."""
        return self.path / "metrics.jsonl"

    @property
    def spans(self) -> Path:
        """One JSON object a task."""
        return self.path / "spans.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object a fault, recovery or save."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """See resources/checkpoints.py."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """One parquet file an iteration."""
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        """One file a worker."""
        return self.path / "logs"

    @classmethod
    def create(cls, runs: Path, name: str) -> "RunDirectory":
        """A new folder RUNS/NAME, locked by this process.

        Raises RunDirectoryError when it exists or must not be made there, OSError when the disk says no.
        """
        path = runs / name
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise _taken(path) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise RunDirectoryError(
                f"{path} cannot be made: {error.strerror}; choose another folder (--set run_dir=...)"
            ) from error
        run = cls(path)
        for folder in (run.samples, run.logs):
            folder.mkdir()
        run.acquire()
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run. Raises RunDirectoryError when there is none."""
        if not is_run_folder(path):
            raise RunDirectoryError(f"{path} is no run folder: it has no config.yaml")
        return cls(path)

    @property
    def is_side_run(self) -> bool:
        """Whether one thing was done alone here."""
        return any(event.get("kind") == SIDE_RUN for event in read_lines(self.events))

    def acquire(self) -> None:
        """Hold the run's lock until `release` or the end of the process; raises RunDirectoryError when another does."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode().strip()
            os.close(descriptor)
            raise RunDirectoryError(
                f"{self.path} is in use by process {holder}; wait for it or end it first"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self._lock = descriptor

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the resolved config: whole and on the disk, or not at all. Raises OSError (a full disk, say)."""
        aside = self.path / ".config.yaml.writing"
        with aside.open("w") as file:
            file.write(write_plain_yaml(dict(config)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.config_file)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name, too
        finally:
            os.close(folder)

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        """Add one JSON line and have it on the disk before returning. Raises OSError with the file as it was."""
        append_lines(path, json.dumps(record, sort_keys=True) + "\n", is_synced=True)

    def event(self, kind: str, **facts: Any) -> None:
        """Record that something happened, with the time of day."""
        self.append(self.events, {"time": datetime.now(UTC).isoformat(), "kind": kind, **facts})

    def cut(self, path: Path, length: int) -> None:
        """Shorten a file of lines to a committed length; a file that is shorter or absent stays."""
        if path.exists() and path.stat().st_size > length:
            with path.open("r+b") as file:
                file.truncate(length)
                os.fsync(file.fileno())

    def cut_after(self, path: Path, iteration: int) -> None:
        """Keep the lines of a file whose `iteration` is below `iteration`, or that have none.

        Torn ones are dropped, and those whose iteration is no number: nobody can tell where they belong.
        """
        if not path.exists():
            return
        numbered = ((line.get("iteration", -1), line) for line in read_lines(path))
        kept = [line for number, line in numbered if type(number) is int and number < iteration]
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))
        os.replace(aside, path)


def check_free(runs: Path, name: str) -> None:
    """Raise RunDirectoryError where something lies at RUNS/NAME; `RunDirectory.create` makes sure of it later."""
    if os.path.lexists(runs / name):
        raise _taken(runs / name)


def _taken(path: Path) -> RunDirectoryError:
    """What lies there decides what can be done about it."""
    other = "give the new run another name (--set name=...)"
    if not is_run_folder(path):
        what = "holds no config.yaml, so there is nothing to resume: remove it"
        return RunDirectoryError(f"{path} exists and {what}, or {other}")
    if RunDirectory(path).is_side_run:
        what = "is of `callsheet sft` or `evaluate`, which cannot be resumed: remove it"
        return RunDirectoryError(f"{path} exists and {what}, or {other}")
    return RunDirectoryError(f"{path} exists; resume it (callsheet resume {path}), or {other}")


def is_run_folder(path: Path) -> bool:
    """Whether a run lies at `path`; a name too long for a folder is none."""
    return os.path.isfile(path / "config.yaml")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; a line that is torn or holds anything else is stepped over."""
    if not path.is_file():
        return
    for line in path.read_text(errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (RecursionError, ValueError):  # a number of thousands of digits is no JSONDecodeError
            continue
        if isinstance(record, dict):
            yield record
