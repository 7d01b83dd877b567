"""A layout to ask the simulator about: which role on which pool, how many ranks, how it shares, which batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from configs.pools import MOST_BUNDLES
from resources.telemetry.profile import RunProfile, TaskProfile

STYLES = ("fused", "shared", "split")
MOST_ROWS = 1_000_000
"""Responses of one iteration that a what-if draws the lengths of, a second or so."""
MOST_ASYNC_DEPTH = 1000
"""Iterations ahead that a what-if simulates; beyond a few nothing changes."""
MOST_CORES = 1_000_000
"""Of all nodes together."""
CPU_ROLES = frozenset({"reward", "advantage", "env"})
"""Roles that use no accelerator, whatever their pool; a reward *model* is named in `accelerated_rewards`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A layout. `pools` are ranks (bundles) by name; `colocate` says for each role how it shares its pool.

    >>> layout = Topology(pools={"a": 4, "b": 2}, roles={"actor": "a", "rollout": "b"})
    >>> layout.ranks_of("rollout"), layout.num_ranks
    (2, 6)
    """

    pools: Mapping[str, int]
    roles: Mapping[str, str]
    colocate: Mapping[str, str] = field(default_factory=dict)
    accelerator_pools: frozenset[str] = frozenset()
    group_size: int = 1
    prompts_per_iteration: int = 1
    async_depth: int = 0
    tensor_parallel: int = 1
    """Ranks of one rollout engine."""
    max_running_sequences: int | None = None
    """As measured when None."""
    cores: float = 0.0
    """Of all nodes; 0 means plenty."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Role -> processes it is limited to, however large its pool."""

    def __post_init__(self) -> None:
        missing = sorted(set(self.roles.values()) - set(self.pools))
        if missing:
            raise ValueError(f"roles name pools {missing}, which are not among {sorted(self.pools)}; add them to pools")
        for name, ranks in self.pools.items():
            if ranks < 1:
                raise ValueError(f"pool {name!r} has {ranks} ranks; a pool has at least 1")
        for name in ("group_size", "prompts_per_iteration", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        rows = self.prompts_per_iteration * self.group_size
        if rows > MOST_ROWS:
            raise ValueError(
                f"prompts_per_iteration x group_size is {rows}; rows are simulated one by one, {MOST_ROWS} at most"
            )
        if self.max_running_sequences is not None and self.max_running_sequences < 1:
            raise ValueError(f"max_running_sequences is {self.max_running_sequences}; it is at least 1")
        if self.cores < 0:
            raise ValueError(f"cores is {self.cores:g}; it is 0 (plenty) or more")
        self._check_depth()
        wrong = sorted({style for style in self.colocate.values() if style not in STYLES})
        if wrong:
            raise ValueError(f"colocate has {wrong}; a role is {', '.join(STYLES)}")
        if "rollout" in self.roles and self.tensor_parallel > self.ranks_of("rollout"):
            raise ValueError(
                f"roles.rollout.tensor_parallel is {self.tensor_parallel}; the rollout has {self.ranks_of('rollout')} "
                "ranks in its pool; lower it, or give the pool more bundles"
            )

    def _check_depth(self) -> None:
        if not 0 <= self.async_depth <= MOST_ASYNC_DEPTH:
            raise ValueError(f"async_depth is {self.async_depth}; it is 0 (on-policy) to {MOST_ASYNC_DEPTH}")
        if self.async_depth and self.is_fused_with("actor", "rollout"):
            raise ValueError(
                f"async_depth is {self.async_depth}, and actor and rollout are one process in pool "
                f"{self.roles['actor']!r}, where no rollout can run beside an update; give rollout a pool of its own "
                "(pools.NAME.bundles and roles.rollout.pool=NAME) with roles.rollout.colocate=shared, or set "
                "async_depth to 0"
            )

    @property
    def num_ranks(self) -> int:
        return sum(self.pools.values())

    def ranks_of(self, role: str) -> int:
        ranks = self.pools[self.roles[role]]
        return min(ranks, self.workers.get(role, ranks))

    def style_of(self, role: str) -> str:
        return self.colocate.get(role, "shared")

    def is_fused_with(self, role: str, other: str) -> bool:
        """Both in one process per bundle: weights go over in memory."""
        if self.roles.get(role) != self.roles.get(other):
            return False
        return self.style_of(role) == self.style_of(other) == "fused"

    def describe(self) -> str:
        """One line: pools with ranks and roles."""
        parts = []
        for name, ranks in self.pools.items():
            roles = [
                role + ("" if self.style_of(role) == "shared" else f" ({self.style_of(role)})")
                for role in self.roles
                if self.roles[role] == name
            ]
            parts.append(f"{name}[{ranks}]: {', '.join(roles) or 'empty'}")
        return "; ".join(parts) + (f"; async_depth {self.async_depth}" if self.async_depth else "")


def measured_topology(profile: RunProfile) -> Topology:
    """The layout the run had."""
    return Topology(
        pools=dict(profile.pools),
        roles=dict(profile.roles),
        colocate=dict(profile.colocate),
        accelerator_pools=profile.accelerator_pools,
        group_size=profile.group_size,
        prompts_per_iteration=profile.prompts_per_iteration,
        async_depth=profile.async_depth,
        tensor_parallel=_tensor_parallel(profile),
        cores=profile.cores,
        workers=_few_engines(profile),
    )


def _tensor_parallel(profile: RunProfile) -> int:
    if profile.rollout is None or "rollout" not in profile.roles:
        return 1
    return min(profile.rollout.tensor_parallel, profile.pools[profile.roles["rollout"]])


def _few_engines(profile: RunProfile) -> dict[str, int]:
    """The rollout's ranks, where they are fewer than its pool has bundles."""
    if profile.rollout is None or "rollout" not in profile.roles:
        return {}
    ranks = profile.rollout.num_engines * _tensor_parallel(profile)
    return {"rollout": ranks} if ranks < profile.pools[profile.roles["rollout"]] else {}


def ranks_of_task(task: TaskProfile, profile: RunProfile, topology: Topology) -> int:
    """Ranks that a task gets: its pool's bundles, or as many fewer or more of them as it was measured with.

    Never more than the layout's `workers` of its role.
    """
    before = profile.pools.get(profile.roles.get(task.role, ""), task.num_ranks)
    if before == task.num_ranks:
        ranks = topology.ranks_of(task.role)
    else:
        is_moved = topology.roles[task.role] != profile.roles[task.role]
        bundles = topology.pools[topology.roles[task.role]]
        ranks = max(1, round(task.num_ranks * (1.0 if is_moved else bundles / before)))
    return min(ranks, topology.workers.get(task.role, ranks))


def with_ranks(topology: Topology, **ranks: int) -> Topology:
    """The layout with other pool sizes, e.g. `with_ranks(layout, rollout=2)`; names are pools'."""
    unknown = sorted(set(ranks) - set(topology.pools))
    if unknown:
        raise ValueError(f"pools {unknown} do not exist; there are {sorted(topology.pools)}")
    pools = {**topology.pools, **ranks}
    return replace(topology, pools=pools, workers=_kept_workers(topology, pools, topology.roles))


def _kept_workers(base: Topology, pools: Mapping[str, int], roles: Mapping[str, str]) -> dict[str, int]:
    """Limits of roles whose pool stays as it was: one that grows, shrinks or is another is filled."""
    return {
        role: limit
        for role, limit in base.workers.items()
        if roles.get(role) == base.roles.get(role) and pools[roles[role]] == base.pools[base.roles[role]]
    }


def override_topology(base: Topology, changes: Mapping[str, str]) -> Topology:
    """The layout with changes in the words of the config, as `callsheet whatif RUN --set KEY=VALUE` gives them.

    Keys: `pools.NAME`, `pools.NAME.bundles` or `pools.NAME.nodes` (ranks; a new name makes a pool), `roles.ROLE.pool`,
    `roles.ROLE.colocate`, `roles.rollout.tensor_parallel`, `rollout.group_size`, `rollout.max_running_sequences`,
    `data.prompts_per_iteration`, `async_depth`, `cores`. Pools that all roles have left are dropped.
    Raises ValueError naming the key and what is allowed, also for the size of a pool that no role stands in or leaves.

    >>> base = Topology(pools={"main": 2}, roles={"actor": "main", "rollout": "main"})
    >>> override_topology(base, {"pools.engines": "4", "roles.rollout.pool": "engines"}).describe()
    'main[2]: actor; engines[4]: rollout'
    """
    pools, roles, colocate = dict(base.pools), dict(base.roles), dict(base.colocate)
    plain: dict[str, int] = {}
    sized: dict[str, str] = {}
    accelerated = set(base.accelerator_pools)
    for key, value in changes.items():
        match key.split("."):
            case ["pools", name] | ["pools", name, ("bundles" | "nodes")]:
                if name not in pools and accelerated:
                    accelerated.add(name)
                pools[name] = pool_size(key, value)
                sized[name] = key
            case ["roles", role, "pool"] if role in roles:
                roles[role] = value
            case ["roles", role, "colocate"] if role in roles:
                colocate[role] = value
            case ["roles", "rollout", ("tensor_parallel" as name)]:
                plain[name] = _whole(key, value, MOST_BUNDLES)
            case ["rollout", ("group_size" | "max_running_sequences") as name] | [
                "data",
                ("prompts_per_iteration" as name),
            ]:
                plain[name] = _whole(key, value, MOST_ROWS)
            case ["cores" as name]:
                plain[name] = _whole(key, value, MOST_CORES)
            case ["async_depth" as name]:
                plain[name] = _whole(key, value, MOST_ASYNC_DEPTH, least=0)
            case _:
                raise ValueError(
                    f"{key!r} is nothing a what-if can change; it can change pools.NAME.bundles, roles.ROLE.pool"
                    " and .colocate"
                    f" (roles here: {', '.join(sorted(roles))}), roles.rollout.tensor_parallel, rollout.group_size,"
                    " rollout.max_running_sequences, data.prompts_per_iteration, async_depth, cores"
                )
    used = set(roles.values())
    for name, key in sized.items():
        if name not in used | set(base.roles.values()):
            raise ValueError(
                f"{key} is {pools[name]}; no role stands in pool {name!r}, so its size changes nothing; move a role "
                f"there with roles.ROLE.pool={name}, or name one of {sorted(used)}"
            )
    kept = {name: ranks for name, ranks in pools.items() if name in used}
    return replace(
        base,
        pools=kept,
        roles=roles,
        colocate=colocate,
        accelerator_pools=frozenset(accelerated & used),
        workers=_kept_workers(base, kept, roles),
        **plain,
    )


def pool_size(key: str, value: str) -> int:
    """Bundles of a pool in the config's words: `4`, or `[2, 2]` of `nodes`. Raises ValueError.

    >>> pool_size("pools.main.bundles", "4"), pool_size("pools.main.nodes", "[2, 2]")
    (4, 4)
    """
    if not key.endswith(".nodes"):
        return _whole(key, value, MOST_BUNDLES)
    counts = value.strip().removeprefix("[").removesuffix("]").split(",")
    return sum(_whole(key, count.strip(), MOST_BUNDLES) for count in counts)


def _whole(key: str, value: str, most: int, *, least: int = 1) -> int:
    rule = f"it is a whole number from {least} to {most}; give one, for example {key}={max(least, 1)}"
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{key} is {value or 'empty'}; {rule}") from None
    if not least <= number <= most:
        raise ValueError(f"{key} is {number}; {rule}")
    return number
