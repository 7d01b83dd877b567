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

CREATED, STARTED, SIDE_RUN = "created", "started", "side-run"
"""Events: the folder was made, and by which flow run; the run has its pools and begins; one thing is done alone here, a
fit or an evaluation, and there is nothing to go on with."""
OWN_NAMES = (
    "config.yaml", "metrics.jsonl", "spans.jsonl", "events.jsonl", "lock", "samples", "checkpoints", "logs", "model",
    "tensorboard", "wandb", "result.json", "report.html",
)  # fmt: skip
"""What a run, and what is said of it, writes to its folder."""


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
        """A run to go on with. Raises RunDirectoryError where there is none, or one that has nothing to go on with."""
        if not is_run_folder(path):
            raise RunDirectoryError(f"{path} is no run folder: it has no config.yaml")
        run = cls(path)
        if run.is_side_run:
            raise RunDirectoryError(
                f"{path} is of `callsheet sft` or `evaluate`, which begin anew: call that again under another name"
                " (--set name=...)"
            )
        return run

    @property
    def is_side_run(self) -> bool:
        """Whether one thing was done alone here."""
        return any(event.get("kind") == SIDE_RUN for event in read_lines(self.events))

    @property
    def has_begun(self) -> bool:
        """Whether a run came so far as to have its pools."""
        return any(event.get("kind") == STARTED for event in read_lines(self.events))

    def is_made_by(self, flow_run: str) -> bool:
        """Whether this flow run made the folder, or has gone on with it."""
        return any(event.get("flow_run") == flow_run for event in read_lines(self.events))

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

    def discard(self) -> list[str]:
        """Remove the folder of a run that has not begun. Where more lies in it than was made with it, all of it stays.

        Returns the names of what is more. The lock goes last: who asks meanwhile finds the folder in use, or no run.
        """
        made = {self.config_file.name, self.events.name, "lock", self.samples.name, self.logs.name}
        more = [one.name for one in self.path.iterdir() if one.name not in made]
        more += [f"{folder.name}/{one.name}" for folder in (self.samples, self.logs) for one in folder.iterdir()]
        if not more:
            for file in (self.config_file, self.events):
                file.unlink(missing_ok=True)
            self.samples.rmdir()
            self.logs.rmdir()
            self.release()
            (self.path / "lock").unlink()
            self.path.rmdir()
        return sorted(more)

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


def own_name(run: Path, path: Path) -> str | None:
    """Which of the run's own files `path` is, or would lie in; None for a place that the run does not use."""
    whole = Path(os.path.realpath(path.parent), path.name)
    folder = Path(os.path.realpath(run))
    first = whole.relative_to(folder).parts[:1] if whole.is_relative_to(folder) else ()
    return first[0] if first and first[0] in OWN_NAMES else None


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
