"""Resource pools: which bundles of CPUs and accelerators exist, and on how many nodes."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from configs.base import Config, Count, PositiveInts
from configs.problems import as_written

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB|B)?$")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: object) -> object:
    """'900GiB' -> bytes; integers pass unchanged. Raises ValueError for anything else that is a string."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes, or '64GiB'; units are KiB, MiB, GiB, TiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def bytes_schema(least: int = 1) -> dict[str, Any]:
    """JSON schema of a size in bytes; how small a size with a unit is, a schema cannot tell."""
    return {"anyOf": [{"type": "integer", "minimum": least}, {"type": "string", "pattern": _SIZE.pattern}]}


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), WithJsonSchema(bytes_schema())]
"""A size in bytes; strings such as '64GiB' are read."""


MOST_BUNDLES = 16_384
"""Of one pool, and workers of one role: more is a slip of the hand, and a plan of each would take minutes."""


class PoolConfig(Config):
    """One resource pool: either `nodes: [8, 8]` or `bundles: 12` with a strategy."""

    nodes: PositiveInts | None = None
    """Bundles on each of that many *distinct* nodes; one STRICT_PACK placement group an entry."""
    bundles: Count | None = None
    """That many bundles in one placement group, wherever `strategy` lets them land."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Only with `bundles`."""
    accelerator: str = "none"
    """`none`, `gpu`, `npu`, or the name of a custom Ray resource."""
    accelerator_type: str | None = None
    """A label Ray knows, for example H100; only nodes that carry it are used."""
    accelerators_per_bundle: Annotated[float, Field(ge=1e-4, le=1.0)] = 1.0
    """One bundle is one accelerator, or a share of one when several runs divide a card."""
    cpus_per_bundle: Annotated[float, Field(gt=0.0)] = 1.0
    memory_per_bundle: Bytes | None = None
    """Host memory reserved with a bundle."""
    colocated_groups: Count = 8
    """How many worker groups may share one bundle as processes of their own."""
    lifetime: Literal["run", "detached"] = "run"
    """`detached` pools outlive the run and are removed by `callsheet clean`."""

    @model_validator(mode="after")
    def _one_form(self) -> "PoolConfig":
        if (self.nodes is None) == (self.bundles is None):
            given = f"nodes is {as_written(self.nodes)} and bundles is {as_written(self.bundles)}"
            raise ValueError(f"{given}; give exactly one of them")
        if self.nodes is not None and not self.nodes:
            raise ValueError("nodes is empty; name at least one node, for example nodes: [1]")
        if self.size > MOST_BUNDLES:
            raise ValueError(
                f"the pool has {self.size} bundles, more than the {MOST_BUNDLES} that are planned; lower it"
            )
        if self.accelerators_per_bundle != 1.0 and self.accelerator == "none":
            raise ValueError(
                f"accelerators_per_bundle is {self.accelerators_per_bundle:g} but accelerator is none; name it"
            )
        if self.accelerator_type is not None and self.accelerator == "none":
            raise ValueError(
                f"accelerator_type is {self.accelerator_type!r} but accelerator is none; name the accelerator"
            )
        return self

    @property
    def size(self) -> int:
        """Number of bundles."""
        return sum(self.nodes) if self.nodes is not None else int(self.bundles or 0)


RoleName = Literal[
    "actor",
    "rollout",
    "actor_rollout",
    "actor_rollout_reference",
    "critic",
    "reference",
    "reward",
    "teacher",
    "env",
    "advantage",
]


class RoleConfig(Config):
    """Where a role works and what each of its workers gets."""

    pool: str
    colocate: Literal["fused", "shared", "split"] = "shared"
    """`fused`: with the pool's other fused roles in one process per bundle; `shared`: a process of its own on a
    share of the bundle; `split`: the only one on its bundles."""
    workers: Annotated[int, Field(ge=1, le=MOST_BUNDLES)] | None = None
    """Workers of this role; one per bundle when left out."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the bundle's accelerator; an equal share among the processes there when left out."""
    cpus: Annotated[float, Field(gt=0.0)] | None = None
    """CPUs each worker asks of its bundle; an equal share when left out."""
    threads: Count | None = None
    """Threads of torch and of OpenMP in each worker; what the bundle's CPUs allow when left out."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment for the workers; the keys Callsheet sets itself are refused."""
    worker: str | None = None
    """Import path `package.module:Class` of a worker class of your own."""
    tensor_parallel: Count = 1
    """Ranks that share each layer; fused roles may have different ones, and so it is with `sequence_parallel`."""
    sequence_parallel: Count = 1
