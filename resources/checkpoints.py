"""Committed checkpoints of a run: written aside, checksummed, fsynced, published by one atomic rename.

    RUN_DIR/checkpoints/iteration-000042/          complete, since the name exists
        manifest.json                              iteration, versions, data position, KL coefficient, checksums
        actor/rank-00000.{safetensors,json} ...    see tensor_files.py
    RUN_DIR/checkpoints/.writing-000043-<pid>/     what a killed save leaves; never read, removed by the next

The number in the name is the number of iterations done. `latest` goes by number and by a manifest whose
checksums hold, never by the clock or by the order of names.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resources.tensor_files import sync_file

FORMAT = 1
_NAME = re.compile(r"^iteration-(\d{6,})$")


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged, or of another format."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is, beside its tensors.

    `iteration` counts finished iterations: a run resumed from it starts with iteration number `iteration`.
    """

    run_id: str
    iteration: int
    policy_version: int
    data_position: dict[str, Any]
    kl_coef: float
    config_digest: str
    metrics_bytes: int
    """Size of metrics.jsonl at this point; a resume cuts the file there."""
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """Small state of other parts: running reward statistics, curriculum, ..."""
    checksums: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, iteration: int) -> Path:
        """An empty folder to write into; leftovers of killed saves are removed first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        staging = self.folder / f".writing-{iteration:06d}-{os.getpid()}"
        staging.mkdir()
        return staging

    def commit(self, staging: Path, manifest: Manifest) -> Path:
        """Checksum and fsync all of `staging`, then publish it by a rename. Publishing twice is harmless.

        Raises OSError (a full disk, say) with nothing published and the older checkpoints untouched.
        """
        final = self.path_of(manifest.iteration)
        if final.exists():
            shutil.rmtree(staging)
            return final
        sums = {path.relative_to(staging).as_posix(): _checksum(path) for path in _files(staging)}
        complete = json.dumps({**asdict(manifest), "checksums": sums}, sort_keys=True, indent=1)
        (staging / "manifest.json").write_text(complete)
        for path in [*_files(staging), *(p for p in staging.rglob("*") if p.is_dir()), staging]:
            sync_file(path)
        os.rename(staging, final)
        sync_file(self.folder)
        return final

    def path_of(self, iteration: int) -> Path:
        """Where the checkpoint of that many finished iterations lies."""
        return self.folder / f"iteration-{iteration:06d}"

    def iterations(self) -> list[int]:
        """Numbers of the published checkpoints, ascending by value."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.match(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, iteration: int) -> Manifest:
        """The manifest of a checkpoint, checksums verified. Raises CheckpointError if anything is off."""
        folder = self.path_of(iteration)
        try:
            raw = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: no readable manifest.json ({error})") from error
        if raw.get("format") != FORMAT:
            raise CheckpointError(f"{folder.name}: format {raw.get('format')!r}; this version reads {FORMAT}")
        for name, checksum in raw["checksums"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder.name}: {name} is missing")
            if _checksum(path) != checksum:
                raise CheckpointError(f"{folder.name}: {name} does not match its checksum")
        return Manifest(**raw)

    def latest(self) -> tuple[Manifest | None, list[str]]:
        """The newest whole checkpoint, and what was wrong with newer ones (for the log)."""
        problems: list[str] = []
        for leftover in sorted(self.folder.glob(".writing-*")) if self.folder.is_dir() else []:
            problems.append(f"{leftover.name}: a save that was cut off")
        for iteration in reversed(self.iterations()):
            try:
                return self.read(iteration), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def prune(self, keep: int, keep_also: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep` checkpoints (-1: all stay) and those of `keep_also`; returns what went.

        The newest whole checkpoint always stays.
        """
        if keep == 0 or keep < -1:
            raise ValueError(f"keep is {keep}; use -1 to keep all, or at least 1")
        if keep == -1:
            return []
        newest, _ = self.latest()
        stay = set(self.iterations()[-keep:]) | set(keep_also) | ({newest.iteration} if newest else set())
        gone = [iteration for iteration in self.iterations() if iteration not in stay]
        for iteration in gone:
            # Renamed first: a half-removed folder must never look like a checkpoint.
            doomed = self.folder / f".writing-{iteration:06d}-removed"
            os.rename(self.path_of(iteration), doomed)
            shutil.rmtree(doomed)
        return gone

    def best(self, metric: str) -> int | None:
        """The iteration whose checkpoint has the highest `metric`; the earlier one of equals."""
        scored = [(self._metric(iteration, metric), iteration) for iteration in self.iterations()]
        known = [(value, -iteration) for value, iteration in scored if value is not None]
        return -max(known)[1] if known else None

    def _metric(self, iteration: int, metric: str) -> float | None:
        try:
            return json.loads((self.path_of(iteration) / "manifest.json").read_text())["metrics"].get(metric)
        except (OSError, ValueError, KeyError):
            return None


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
