"""What a role's workers are made of, and what they need of the run they belong to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from resources.ranks import Mesh
from resources.supervision import Supervisor

START_SECONDS = 120.0
CALL_SECONDS = 600.0


class Endable(Protocol):
    """Processes that the run ends when it ends."""

    def stop(self) -> None: ...

    @property
    def is_detached(self) -> bool: ...


class Home(Protocol):
    """What processes need of the run they belong to; `Cluster` is one."""

    run_id: str
    worker_env: dict[str, str]

    @property
    def supervisor(self) -> Supervisor: ...

    @property
    def log_dir(self) -> Path: ...

    def adopt(self, processes: Endable) -> None: ...


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One role's workers: a class, its constructor arguments, and what each process gets."""

    role: str
    worker: type | str
    """A class, or its import path `package.module:Class`."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    fraction: float | None = None
    """Share of the bundle's accelerator; an equal share among the processes started together when left out."""
    cpus: float | None = None
    """CPUs of a process; that share of the bundle's when left out."""
    threads: int | None = None
    """Threads of torch, OpenMP and BLAS; the CPUs, rounded down, when left out."""
    env: Mapping[str, str] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)
    rendezvous: bool = True
    """Host a store for torch.distributed; False keeps torch out of rank 0."""
    call_seconds: float = CALL_SECONDS
    """Deadline of a call that gives none."""
    start_seconds: float = START_SECONDS
