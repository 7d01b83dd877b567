"""Committed checkpoints of a run: written aside, checksummed, fsynced, published by one atomic rename.

    RUN_DIR/checkpoints/iteration-000042/          complete, since the name exists
        manifest.json                              iteration, versions, data position, KL coefficient, checksums
        actor/rank-00000.{safetensors,json} ...    see tensor_files.py
    RUN_DIR/checkpoints/.writing-000043-<pid>/     what a killed save leaves; never read, removed by the next

The number in the name is the number of iterations done. `latest` goes by number and by a manifest whose
checksums hold, never by the clock or by the order of names.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resources.tensor_files import file_checksum, sync_file

FORMAT = 2
"""1 had other checksums."""
_NAME = re.compile(r"^iteration-(\d{6,})$")
_REMOVED = "-removed"


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
        self._open: set[Path] = set()
        """Saves of this process that are being written."""
        self.passed_over: set[int] = set()
        """Published ones that `latest` could not go on from; the next save of such an iteration takes its place."""

    def begin(self, iteration: int) -> Path:
        """An empty folder to write into; leftovers of killed saves are removed first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".writing-*"):
            if leftover not in self._open:
                shutil.rmtree(leftover, ignore_errors=leftover.name.endswith(_REMOVED))  # it waits for the next save
        staging = self.folder / f".writing-{iteration:06d}-{os.getpid()}"
        self._open.add(staging)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        return staging

    def commit(self, staging: Path, manifest: Manifest, checksums: Mapping[str, str] | None = None) -> Path:
        """Checksum and fsync all of `staging`, then publish it by a rename.

        One of that iteration that stands already is kept if it is whole and counts the same lines, else replaced.
        `checksums` are of files that their writers have hashed and fsynced already, by path below `staging`.
        Raises OSError (a full disk, say) with nothing published and the older checkpoints untouched.
        """
        self._open.discard(staging)
        final = self.path_of(manifest.iteration)
        if self._stands(manifest):
            shutil.rmtree(staging)
            return final
        known = dict(checksums or {})
        files = {path.relative_to(staging).as_posix(): path for path in _files(staging)}
        sums = {name: known.get(name) or file_checksum(path) for name, path in files.items()}
        complete = json.dumps({**asdict(manifest), "checksums": sums}, sort_keys=True, indent=1)
        written = staging / "manifest.json"
        written.write_text(complete)
        own = [path for name, path in files.items() if name not in known]
        for path in [*own, written, *(p for p in staging.rglob("*") if p.is_dir()), staging]:
            sync_file(path)
        damaged = self._set_aside(manifest.iteration) if final.exists() else None
        os.rename(staging, final)
        sync_file(self.folder)
        self.passed_over.discard(manifest.iteration)
        if damaged is not None:
            shutil.rmtree(damaged, ignore_errors=True)  # the next save removes what is left of it
        return final

    def _stands(self, manifest: Manifest) -> bool:
        """Whether that iteration has a checkpoint to go on from: whole, and of the lines that metrics.jsonl holds."""
        if manifest.iteration in self.passed_over:
            return False
        try:
            return self.read(manifest.iteration).metrics_bytes == manifest.metrics_bytes
        except (CheckpointError, OSError):
            return False

    def _set_aside(self, iteration: int) -> Path:
        """Take a checkpoint's name away at once: a half-removed folder must never look like a checkpoint."""
        doomed = self.folder / f".writing-{iteration:06d}{_REMOVED}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(self.path_of(iteration), doomed)
        return doomed

    def discard(self, staging: Path) -> None:
        """Give up a save: its folder goes, and with it the space it took."""
        self._open.discard(staging)
        shutil.rmtree(staging, ignore_errors=True)

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
        folder, manifest = self.path_of(iteration), self._manifest(iteration)
        for name, checksum in manifest.checksums.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder.name}: {name} is missing")
            if file_checksum(path) != checksum:
                raise CheckpointError(f"{folder.name}: {name} does not match its checksum")
        return manifest

    def _manifest(self, iteration: int) -> Manifest:
        """As `read`, without looking at the files."""
        folder = self.path_of(iteration)
        raw = _manifest_of(folder)
        if raw.get("format") != FORMAT:
            raise CheckpointError(f"{folder.name}: format {raw.get('format')!r}; this version reads {FORMAT}")
        try:
            manifest = Manifest(**{**raw, "checksums": dict(raw["checksums"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: manifest.json is not as this version writes it ({error})") from error
        if manifest.iteration != iteration:
            raise CheckpointError(
                f"{folder.name}: its manifest.json is of iteration {manifest.iteration}, and the folder's name says "
                f"{iteration}; give the folder its own name back"
            )
        return manifest

    def newest_manifest(self) -> Manifest | None:
        """What the newest checkpoint says of itself, whether or not its files are whole; None without one."""
        for iteration in reversed(self.iterations()):
            with contextlib.suppress(CheckpointError):
                return self._manifest(iteration)
        return None

    def latest(self, metrics: Path | None = None) -> tuple[Manifest | None, list[str]]:
        """The newest whole checkpoint, and what was wrong with newer ones (for the log).

        With `metrics`, one that counts lines which that file does not hold is passed over too: going on from it would
        leave a gap.
        """
        problems: list[str] = []
        for leftover in sorted(self.folder.glob(".writing-*")) if self.folder.is_dir() else []:
            problems.append(f"{leftover.name}: a save that was cut off")
        for iteration in reversed(self.iterations()):
            try:
                found = self.read(iteration)
                if metrics is not None:
                    _check_lines(metrics, found)
            except CheckpointError as error:
                problems.append(str(error))
                self.passed_over.add(iteration)
                continue
            self.passed_over.discard(iteration)
            return found, problems
        return None, problems

    def newest(self, tell: Callable[[str], object] = str) -> Manifest:
        """The newest whole checkpoint; `tell` is called with what is wrong with each newer one.

        Raises CheckpointError where there is none, with what is wrong with each.
        """
        found, problems = self.latest()
        if found is None:
            why = "; ".join(problems) or "one is written every checkpoint.every iterations"
            raise CheckpointError(f"{self.folder} has no complete checkpoint: {why}")
        for problem in problems:
            tell(problem)
        return found

    def prune(self, keep: int, keep_also: Collection[int] = (), newest: int | None = None) -> list[int]:
        """Remove all but the newest `keep` checkpoints (-1: all stay) and those of `keep_also`; returns what went.

        The newest whole checkpoint always stays: `newest`, just published, or else found by reading all of it.
        """
        if keep == 0 or keep < -1:
            raise ValueError(f"keep is {keep}; use -1 to keep all, or at least 1")
        if keep == -1:
            return []
        stay = set(self.iterations()[-keep:]) | set(keep_also)
        if newest is None:
            found, _ = self.latest()
            newest = found.iteration if found is not None else None
        stay |= {newest} if newest is not None else set()
        gone = [iteration for iteration in self.iterations() if iteration not in stay]
        for iteration in gone:
            shutil.rmtree(self._set_aside(iteration))
        return gone

    def best(self, metric: str) -> int | None:
        """The iteration whose checkpoint has the highest `metric`; the earlier one of equals."""
        scored = [(self._metric(iteration, metric), iteration) for iteration in self.iterations()]
        known = [(value, -iteration) for value, iteration in scored if value is not None]
        return -max(known)[1] if known else None

    def _metric(self, iteration: int, metric: str) -> float | None:
        try:
            metrics = _manifest_of(self.path_of(iteration)).get("metrics")
        except CheckpointError:
            return None
        value = metrics.get(metric) if isinstance(metrics, dict) else None
        return value if isinstance(value, int | float) and math.isfinite(value) else None


def _manifest_of(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: no readable manifest.json ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder.name}: manifest.json holds {raw!r:.40}, which is no manifest")
    return raw


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _check_lines(metrics: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless `metrics` begins with a line for each iteration of the checkpoint."""
    counted = metrics.read_bytes()[: manifest.metrics_bytes] if metrics.is_file() else b""
    whole, written = counted.count(b"\n"), manifest.iteration
    if manifest.metrics_bytes and (len(counted) < manifest.metrics_bytes or not counted.endswith(b"\n")):
        what = f"has {whole} whole lines of the {written} that were written by then"
        if whole >= written:
            what = f"was changed since: its first {manifest.metrics_bytes} bytes were {written} lines; put it back"
        raise CheckpointError(f"iteration {written}: {metrics.name} {what}")
