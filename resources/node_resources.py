"""What a node has, told by Ray, by `--nodes "2x(gpu=8,cpu=96,mem=900GiB)"`, or by this machine. Imports no Ray.

Resources carry Ray's names: CPU, GPU, NPU, memory (bytes), and custom ones as they are.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from configs.pools import PoolConfig, parse_bytes

ACCELERATOR_TYPE_LABEL = "ray.io/accelerator-type"
ACCELERATOR_MEMORY_LABEL = "callsheet/accelerator-memory"
_RAY_NAMES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU", "mem": "memory", "memory": "memory"}
_LABELS = {"type": ACCELERATOR_TYPE_LABEL, "vram": ACCELERATOR_MEMORY_LABEL}
MOST_NODES = 16_384
"""Of one group; as many as a pool may have bundles."""
_LEAST_MEMORY = 2**20
"""Of a node or an accelerator, in bytes: less is a number whose unit was forgotten."""
_MOST_DIGITS = 9
_GROUP = re.compile(r"\s*(?:(\d+)\s*x\s*)?\(([^()]*)\)\s*(?:[+;]|$)")
_EXAMPLE = 'write for example "2x(gpu=8,cpu=96,mem=900GiB)", groups joined by +'


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """One node: what it has, what is free of it, and who holds the rest.

    NodeResources(ip="10.0.0.1", node_id="node-1", total={"CPU": 96.0, "GPU": 8.0}, free={"CPU": 96.0, "GPU": 6.0},
                  holders={"callsheet/other/main/0": {"GPU": 2.0}})
    """

    ip: str
    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def accelerator_type(self) -> str | None:
        """For example H100; None where nobody said."""
        return self.labels.get(ACCELERATOR_TYPE_LABEL)


def ray_name(accelerator: str) -> str | None:
    """Ray's resource for a pool's `accelerator`; None for a pool of CPUs."""
    return None if accelerator == "none" else _RAY_NAMES.get(accelerator, accelerator)


def bundle_demand(pool: PoolConfig) -> dict[str, float]:
    """What one bundle of the pool reserves."""
    demand = {"CPU": pool.cpus_per_bundle}
    accelerator = ray_name(pool.accelerator)
    if accelerator is not None:
        demand[accelerator] = pool.accelerators_per_bundle
    if pool.memory_per_bundle is not None:
        demand["memory"] = float(pool.memory_per_bundle)
    return demand


def parse_nodes(text: str) -> tuple[NodeResources, ...]:
    """Nodes from groups such as "2x(gpu=8,cpu=96,mem=900GiB,type=H100) + 1x(cpu=32,mem=64GiB)".

    `type` is the accelerator type, `vram` the memory of one accelerator; any other word is a custom resource.
    Nodes get the addresses 10.0.0.1, 10.0.0.2, ...

    Raises:
        ValueError: what cannot be read, a size that is not positive, a resource named twice.
    """
    nodes: list[NodeResources] = []
    position = 0
    while position < len(text):
        match = _GROUP.match(text, position)
        if match is None:
            raise ValueError(f"--nodes is {text!r}; {text[position:]!r} is no group of nodes; {_EXAMPLE}")
        count = int((match[1] or "1")[:_MOST_DIGITS])
        if not 1 <= count <= MOST_NODES:
            raise ValueError(f"--nodes is {text!r:.80}; a group has 1 to {MOST_NODES} nodes; {_EXAMPLE}")
        total, labels = _parse_group(match[2])
        for _ in range(count):
            number = len(nodes) + 1
            ip = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
            nodes.append(NodeResources(ip=ip, node_id=f"node-{number}", total=total, free=total, labels=labels))
        position = match.end()
    if not nodes:
        raise ValueError(f"--nodes is {text!r}; it names no node; {_EXAMPLE}")
    return tuple(nodes)


def _parse_group(text: str) -> tuple[dict[str, float], dict[str, str]]:
    total: dict[str, float] = {}
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not word or not value:
            raise ValueError(f"--nodes holds {part!r}; a resource is name=amount; {_EXAMPLE}")
        name = _LABELS.get(word) or _RAY_NAMES.get(word.lower(), word)
        if name in total or name in labels:
            raise ValueError(f"--nodes names {word} twice in one group; name each resource once")
        if word == "type":
            labels[name] = value
        elif word == "vram":
            labels[name] = str(int(_amount(word, name, value)))
        else:
            total[name] = _amount(word, name, value)
    if "CPU" not in total:
        raise ValueError(f"--nodes holds the group ({text}) without cpu; every process needs CPUs; {_EXAMPLE}")
    return total, labels


def _amount(word: str, name: str, value: str) -> float:
    is_memory = name in ("memory", ACCELERATOR_MEMORY_LABEL)
    try:
        amount = float(str(parse_bytes(value))) if is_memory else float(value)
    except ValueError:
        rule = "is no size: a number and KiB, MiB, GiB or TiB" if is_memory else "is not an amount"
        raise ValueError(f"--nodes holds {word}={value}; {value!r} {rule}; {_EXAMPLE}") from None
    if is_memory and 0 < amount < _LEAST_MEMORY:
        raise ValueError(
            f"--nodes holds {word}={value}, which is {amount:g} bytes; write for example {word}={value}GiB"
        )
    if not 0 < amount < float("inf"):
        raise ValueError(f"--nodes holds {word}={value}; an amount is above 0; leave out what the nodes do not have")
    if name in ("GPU", "NPU") and amount != int(amount):
        raise ValueError(f"--nodes holds {word}={value}; a node has whole accelerators; pools share one among bundles")
    return amount


def this_machine(num_cpus: int | None = None, num_gpus: int | None = None) -> NodeResources:
    """The machine this runs on, asked without Ray or torch.

    Args:
        num_cpus: logical CPUs a local cluster is given; the machine's own when None.
        num_gpus: the same of GPUs.
    """
    memory = float(psutil.virtual_memory().available)
    total = {"CPU": float(num_cpus or len(os.sched_getaffinity(0))), "memory": memory}
    gpus = num_gpus if num_gpus is not None else count_gpus()
    if gpus:
        total["GPU"] = float(gpus)
    return NodeResources(ip="127.0.0.1", node_id="this-machine", total=total, free=total)


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA devices that the driver shows, fewer where CUDA_VISIBLE_DEVICES says so."""
    found = sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([part for part in visible.split(",") if part.strip() and not part.strip().startswith("-")]))
