"""Who is which rank: the order of bundles, the environment a rank gets, and the mesh the ranks form.

Pure: no Ray, no torch. The order is numeric node IP, then node id, then placement group, then bundle.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from configs.environment import PROTECTED_ENV_KEYS

AXES: tuple[str, ...] = ("pp", "dp", "sp", "tp")
"""Mesh axes, slowest first: neighbours in rank are tensor-parallel peers."""
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What a process that computes on CPUs tells glibc: keep what one step has freed for the next. Pages that went back to
the system have to be zeroed and mapped anew (docs/benchmarks.md). A role's `env` may differ."""
DEVICE_ENV = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""What says which accelerators a process sees. Ray sets it where a process reserves some, and leaves the node's own to
one that reserves none."""


def device_env(accelerators: float) -> Mapping[str, str]:
    """What keeps a rank with so many accelerators off those that it has not reserved.

    >>> device_env(0.0)["CUDA_VISIBLE_DEVICES"]
    ''
    """
    return {} if accelerators else dict.fromkeys(DEVICE_ENV, "")


def memory_env(accelerators: float) -> Mapping[str, str]:
    """What a rank with so many accelerators tells glibc; nothing where the large tensors lie on those.

    >>> memory_env(0.5)
    {}
    """
    return {} if accelerators else KEPT_MEMORY


@dataclass(frozen=True, kw_only=True, slots=True)
class BundlePlace:
    """Where one bundle of a pool landed."""

    node_ip: str
    node_id: str
    group_index: int
    bundle_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank of a group and the node it lives on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_ip: str
    node_id: str


def node_key(node_ip: str, node_id: str) -> tuple[int, int, str]:
    """Sort key of a node: 10.0.0.9 comes before 10.0.0.10. Raises ValueError for what is no IP address."""
    address = ipaddress.ip_address(node_ip)
    return address.version, int(address), node_id


def place_key(place: BundlePlace) -> tuple[int, int, str, int, int]:
    """Sort key of a bundle; the only order anybody ever sees."""
    return *node_key(place.node_ip, place.node_id), place.group_index, place.bundle_index


def assign_ranks(places: Sequence[BundlePlace]) -> list[RankPlace]:
    """One rank per bundle, in order. `places` must already be sorted by `place_key`."""
    nodes = list(dict.fromkeys((place.node_ip, place.node_id) for place in places))
    counts = {node: sum(1 for place in places if (place.node_ip, place.node_id) == node) for node in nodes}
    seen = dict.fromkeys(nodes, 0)
    ranks: list[RankPlace] = []
    for rank, place in enumerate(places):
        node = (place.node_ip, place.node_id)
        ranks.append(
            RankPlace(
                rank=rank,
                world_size=len(places),
                local_rank=seen[node],
                local_world_size=counts[node],
                node_rank=nodes.index(node),
                node_ip=place.node_ip,
                node_id=place.node_id,
            )
        )
        seen[node] += 1
    return ranks


def rank_env(place: RankPlace, prefix: str, master: tuple[str, int] | None) -> dict[str, str]:
    """The environment of one rank. `master` is where rank 0 hosts the rendezvous store; None leaves it out.

    With a store, `TORCHELASTIC_USE_AGENT_STORE` is set: otherwise whoever initialises through `env://` on rank 0
    tries to bind the port a second time and fails.
    """
    env = {
        "WORLD_SIZE": str(place.world_size),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "RAY_LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "WG_PREFIX": prefix,
    }
    if master is not None:
        env |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return env


def check_user_env(role: str, env: Mapping[str, str]) -> None:
    """Raise ValueError when `env` names a key that the resource layer sets."""
    clash = sorted(PROTECTED_ENV_KEYS.intersection(env))
    if clash:
        key = clash[0]
        raise ValueError(
            f"roles.{role}.env sets {key}={env[key]!r}, but {key} is set by Callsheet for every rank; remove it "
            f"(thread counts have the setting roles.{role}.threads)"
        )


def device_index(visible: str | None, local_rank: int) -> int | None:
    """The device a rank should use among those it can see; None means the CPU.

    visible "3" -> 0 (Ray isolated the device); "0,1,2,3" with local rank 2 -> 2; "4,5,6,7" with 2 -> 2 (physical 6);
    "" -> None; not set at all -> the local rank.
    """
    if visible is None:
        return local_rank
    devices = [part for part in visible.split(",") if part.strip()]
    if not devices or devices[0].strip() == "-1":
        return None
    if len(devices) == 1:
        return 0
    if local_rank >= len(devices):
        raise ValueError(f"local rank {local_rank} sees the devices {visible!r}, which are only {len(devices)}")
    return local_rank


def check_distinct_devices(devices: Iterable[tuple[int, str, str]]) -> None:
    """Raise ValueError when two ranks of a node hold one physical device; items are (rank, node id, device id)."""
    seen: dict[tuple[str, str], int] = {}
    for rank, node_id, device in devices:
        other = seen.setdefault((node_id, device), rank)
        if other != rank:
            raise ValueError(
                f"ranks {other} and {rank} both hold device {device} of node {node_id}; give each its own accelerator "
                "or a fraction below 1 (roles.*.fraction)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place in the mesh."""

    dp: int
    tp: int
    pp: int
    sp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Data, tensor, pipeline and sequence parallel sizes; the data-parallel size follows from the world size.

    `order` names the axes from slowest to fastest. Rank 5 of Mesh(tp=2) in a world of 8 is dp 2, tp 1.
    """

    tp: int = 1
    pp: int = 1
    sp: int = 1
    order: tuple[str, ...] = field(default=AXES)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "sp"):
            size = {"tp": self.tp, "pp": self.pp, "sp": self.sp}[name]
            if size < 1:
                raise ValueError(f"mesh {name} is {size}; a mesh axis has at least 1 rank")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"mesh order is {self.order}; name each of {AXES} once")

    def dp_size(self, world_size: int) -> int:
        """Ranks along the data-parallel axis. Raises ValueError when the mesh does not divide the world."""
        model = self.tp * self.pp * self.sp
        if world_size % model:
            below, above = world_size // model * model, (world_size // model + 1) * model
            near = f"{below} or {above}" if below else str(above)
            raise ValueError(
                f"a mesh of tp {self.tp} x pp {self.pp} x sp {self.sp} needs a multiple of {model} ranks and the group "
                f"has {world_size}; the nearest are {near}"
            )
        return world_size // model

    def coordinates(self, rank: int, world_size: int) -> Coordinates:
        """Where `rank` sits."""
        sizes = {"dp": self.dp_size(world_size), "tp": self.tp, "pp": self.pp, "sp": self.sp}
        place: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, sizes[axis])
        return Coordinates(dp=place["dp"], tp=place["tp"], pp=place["pp"], sp=place["sp"])

    def is_collecting(self, rank: int, world_size: int) -> bool:
        """Whether `rank` answers for its data-parallel rank: first of tp and sp, last pipeline stage."""
        at = self.coordinates(rank, world_size)
        return at.tp == 0 and at.sp == 0 and at.pp == self.pp - 1
