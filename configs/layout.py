"""Which processes a config asks for: one group per role, or one for all fused roles of a pool.

Pure arithmetic over the config, shared by the rules, by `callsheet plan` and by whoever makes the worker groups, so
that what is checked, printed and started is the same.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from configs.pools import RoleConfig, RoleName

if TYPE_CHECKING:
    from configs.run import RunConfig

HYBRID_ROLES: dict[str, tuple[RoleName, ...]] = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_reference": ("actor", "rollout", "reference"),
}
"""A hybrid role is one process that does the duties of several."""

STEPS_PER_UNIT = 10_000
"""Ray counts resources in ten-thousandths; shares are cut to whole ones, so that 3 x 1/3 fits."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The processes of one role, or of several roles fused into one process per bundle.

    Two workers of `reward` on a pool of two bundles, beside an actor:
    ProcessGroup(name="reward", pool="main", roles=("reward",), bundles=(0, 1), cpus=0.5, accelerators=0.0, ...)
    """

    name: str
    """The role; `actor+rollout` for fused ones, in the order of the config."""
    pool: str
    roles: tuple[RoleName, ...]
    bundles: tuple[int, ...]
    """Rank -> bundle of the pool, in the pool's order."""
    cpus: float
    """CPUs each process asks of its bundle."""
    accelerators: float
    """Accelerators each process asks of its bundle, in Ray's count; 0 for a process that needs none."""
    threads: int
    """Of torch and OpenMP in each process."""
    part: str = ""
    """Which of the role's models these processes hold: each teacher has processes of its own."""

    @property
    def workers(self) -> int:
        """Processes in the group; its world size."""
        return len(self.bundles)


def cut(share: float) -> float:
    """`share` cut to Ray's granularity: 1/3 -> 0.3333."""
    return int(share * STEPS_PER_UNIT + 1e-6) / STEPS_PER_UNIT


def duties(config: "RunConfig") -> dict[str, RoleName]:
    """Duty -> the role of the config that does it, hybrids unfolded. The rules refuse a duty with two roles."""
    return {duty: role for role in config.roles for duty in HYBRID_ROLES.get(role, (role,))}


def styles(config: "RunConfig") -> dict[str, str]:
    """Duty -> how it shares its pool; the duties of a hybrid role are fused."""
    return {
        duty: "fused" if role in HYBRID_ROLES else config.roles[role].colocate for duty, role in duties(config).items()
    }


def active_roles(config: "RunConfig") -> tuple[RoleName, ...]:
    """Roles that get processes: a critic or reference that the algorithm does not read is left out."""
    idle: set[str] = set()
    if not config.algorithm.needs_critic:
        idle.add("critic")
    if not config.algorithm.needs_reference or config.model.lora is not None:
        idle.add("reference")
    return tuple(role for role in config.roles if role not in idle)


def advantage_pool(config: "RunConfig") -> str:
    """Pool of the advantage step: `roles.advantage.pool`, else the actor's."""
    if "advantage" in config.roles:
        return config.roles["advantage"].pool
    return placed(config, "actor").pool


def uses_accelerator(config: "RunConfig", role: RoleName) -> bool:
    """Whether the role's processes take a share of their bundle's accelerator."""
    where = config.roles.get(role)
    if where is None or config.pools[where.pool].accelerator == "none":
        return False
    if where.fraction is not None:
        return True
    if role == "reward":
        return any(grader.kind == "model" or grader.serves_judge for grader in config.reward.graders)
    return role not in ("env", "advantage")


def process_groups(config: "RunConfig") -> tuple[ProcessGroup, ...]:
    """Every worker group, in the order of the config; the advantage worker last when no role names it."""
    members: dict[str, list[RoleName]] = {}
    for role in active_roles(config):
        where = config.roles[role]
        key = f"fused on {where.pool}" if where.colocate == "fused" else role
        members.setdefault(key, []).append(role)
    if "advantage" not in config.roles:
        members["advantage"] = ["advantage"]
    asks = [part for roles in members.values() for part in _parts(config, _ask(config, tuple(roles)))]
    return tuple(_group(config, ask, asks) for ask in asks)


def placed(config: "RunConfig", duty: str) -> RoleConfig:
    """Where the role that does this duty works. Raises KeyError when no role does it."""
    return config.roles[duties(config)[duty]]


def num_workers(config: "RunConfig", duty: str) -> int:
    """Processes of the role that does this duty."""
    role = placed(config, duty)
    return role.workers or config.pools[role.pool].size


def data_parallel_size(config: "RunConfig", duty: str) -> int:
    """Ranks over which rows are divided: workers / (tensor parallel x sequence parallel)."""
    role = placed(config, duty)
    return max(1, num_workers(config, duty) // (role.tensor_parallel * role.sequence_parallel))


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """What a group's config says, before shares are worked out."""

    roles: tuple[RoleName, ...]
    pool: str
    bundles: tuple[int, ...]
    cpus: float | None
    fraction: float | None
    takes_accelerator: bool
    threads: int | None
    part: str = ""

    @property
    def is_light(self) -> bool:
        """None of its roles runs a model, so it does not compete for threads."""
        return not self.takes_accelerator and all(role in ("advantage", "reward", "env") for role in self.roles)


def _ask(config: "RunConfig", roles: tuple[RoleName, ...]) -> _Ask:
    if roles == ("advantage",) and "advantage" not in config.roles:
        return _Ask(
            roles=roles, pool=advantage_pool(config), bundles=(0,), cpus=None, fraction=None,
            takes_accelerator=False, threads=None,
        )  # fmt: skip
    places = [config.roles[role] for role in roles]
    pool = config.pools[places[0].pool]
    workers = next((role.workers for role in places if role.workers is not None), pool.size)
    per_bundle = max(1, workers // pool.size)
    return _Ask(
        roles=roles,
        pool=places[0].pool,
        bundles=tuple(min(rank // per_bundle, pool.size - 1) for rank in range(workers)),
        cpus=next((role.cpus for role in places if role.cpus is not None), None),
        fraction=next((role.fraction for role in places if role.fraction is not None), None),
        takes_accelerator=any(uses_accelerator(config, role) for role in roles),
        threads=next((role.threads for role in places if role.threads is not None), None),
    )


def _parts(config: "RunConfig", ask: _Ask) -> list[_Ask]:
    """One ask a teacher, each with bundles of its own: the teacher pool is cut into contiguous sub-pools.

    One a replica of the rollout servers: an engine that dies then takes no other with it.
    """
    if ask.roles == ("rollout",) and config.rollout.servers.enabled:
        size = config.roles["rollout"].tensor_parallel
        starts = range(0, len(ask.bundles), size)
        return [
            replace(ask, part=str(index), bundles=ask.bundles[start : start + size])
            for index, start in enumerate(starts)
        ]
    if ask.roles != ("teacher",) or not config.teachers:
        return [ask]
    parts: list[_Ask] = []
    start = 0
    for teacher, size in zip(config.teachers, teacher_sizes(config, len(ask.bundles)), strict=True):
        parts.append(replace(ask, part=teacher.name, bundles=ask.bundles[start : start + size]))
        start += size
    return parts


def teacher_sizes(config: "RunConfig", workers: int) -> list[int]:
    """Workers of each teacher, in the order of the config: what it asks for, or an equal share of what is left."""
    peers = config.roles["teacher"].tensor_parallel
    takers = sum(teacher.workers is None for teacher in config.teachers)
    left = (workers - sum(teacher.workers or 0 for teacher in config.teachers)) // peers
    sizes: list[int] = []
    for teacher in config.teachers:
        if teacher.workers is not None:
            sizes.append(teacher.workers)
            continue
        share = -(-left // takers)
        sizes.append(share * peers)
        left, takers = left - share, takers - 1
    return sizes


def _group(config: "RunConfig", ask: _Ask, asks: list[_Ask]) -> ProcessGroup:
    pool = config.pools[ask.pool]
    neighbours = [other for other in asks if other.pool == ask.pool]
    cpus = ask.cpus if ask.cpus is not None else _equal_share(
        ask, [(other, other.cpus) for other in neighbours], pool.cpus_per_bundle
    )  # fmt: skip
    fraction = 0.0
    if ask.takes_accelerator:
        takers = [(other, other.fraction) for other in neighbours if other.takes_accelerator]
        fraction = ask.fraction if ask.fraction is not None else _equal_share(ask, takers, 1.0)
    heavy = [other for other in neighbours if not other.is_light and set(other.bundles) & set(ask.bundles)]
    threads = 1 if ask.is_light else max(1, int(pool.cpus_per_bundle // max(1, len(heavy))))
    return ProcessGroup(
        name="+".join(ask.roles) + (f".{ask.part}" if ask.part else ""),
        pool=ask.pool,
        roles=ask.roles,
        bundles=ask.bundles,
        cpus=cut(cpus),
        accelerators=cut(cut(fraction) * pool.accelerators_per_bundle),
        threads=ask.threads or threads,
        part=ask.part,
    )


def _equal_share(ask: _Ask, takers: list[tuple[_Ask, float | None]], whole: float) -> float:
    """What the fullest of the group's bundles leaves to each process there that names no share."""
    given: dict[int, float] = defaultdict(float)
    open_processes: dict[int, int] = defaultdict(int)
    for other, share in takers:
        for bundle in other.bundles:
            if share is None:
                open_processes[bundle] += 1
            else:
                given[bundle] += cut(share)
    shares = ((whole - given[bundle]) / open_processes[bundle] for bundle in ask.bundles)
    return max(0.0, min(shares, default=whole))  # no bundle: more teachers than workers, which a rule refuses
