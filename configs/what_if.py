"""A what-if's changes made on the run's own config: what would its rules say of them?

A prediction asks no rule, so that a layout which a config would refuse has one too. This says which it would refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from configs.changes import drop_empty_pools
from configs.layout import HYBRID_ROLES
from configs.load import check_config, dump_config
from configs.problems import ConfigError, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_Plain = dict[str, Any]


def problems_of_changes(config: "RunConfig", changes: Mapping[str, str]) -> list[Problem]:
    """What the rules name when `changes` are made on `config`; empty where it would be accepted.

    `changes` have the keys and values that `resources.telemetry.topology.override_topology` takes. Beside them: roles
    that move or whose pool has another size follow the pool with their workers, a new pool is a copy of the one that
    its first role stood in, a hybrid role is split where a duty of it leaves, pools without roles are gone, and
    `rollout.weight_sync` is `auto` where the way that is set needs actor and rollout as they were. `cores` are the
    machine's. A problem that `colocate: shared` would solve says so.
    """
    asked = _read(changes)
    problems = _refusals(config, asked)
    loose = _roles_to_loosen(config, asked, problems)
    if not loose:
        return problems
    left = _refusals(config, _with_shared(asked, loose))
    hint = "also set " + " and ".join(f"roles.{role}.colocate=shared" for role in loose)
    return [
        problem
        if problem in left
        else replace(problem, way_out=f"{problem.way_out}; {hint}" if problem.way_out else hint)
        for problem in problems
    ]


def pinned_workers(config: "RunConfig", changes: Mapping[str, str]) -> list[str]:
    """Notes on roles whose number of workers the config sets below the size that `changes` give their pool."""
    asked = _read(changes)
    notes: list[str] = []
    for role, where in config.roles.items():
        size = asked.sizes.get(asked.places.get(role, where.pool), 0)
        if where.workers is not None and where.workers < size:
            notes.append(
                f"roles.{role}.workers is {where.workers} in the run's config; the prediction is for {size}, so leave "
                "it out there, or set it so"
            )
    return notes


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The changes, by what they are about; duties are roles with hybrids unfolded."""

    sizes: Mapping[str, int]
    places: Mapping[str, str]
    styles: Mapping[str, str]
    tensor_parallel: int | None
    plain: Mapping[tuple[str, ...], int]


def _read(changes: Mapping[str, str]) -> _Asked:
    sizes: dict[str, int] = {}
    places: dict[str, str] = {}
    styles: dict[str, str] = {}
    plain: dict[tuple[str, ...], int] = {}
    tensor_parallel = None
    for key, value in changes.items():
        match key.split("."):
            case ["pools", name] | ["pools", name, ("bundles" | "nodes")]:
                sizes[name] = sum(int(count) for count in value.strip("[] ").split(","))
            case ["roles", duty, "pool"]:
                places[duty] = value
            case ["roles", duty, "colocate"]:
                styles[duty] = value
            case ["roles", _, "tensor_parallel"]:
                tensor_parallel = int(value)
            case ["cores"]:
                pass
            case path:
                plain[tuple(path)] = int(value)
    return _Asked(sizes=sizes, places=places, styles=styles, tensor_parallel=tensor_parallel, plain=plain)


def _refusals(config: "RunConfig", asked: _Asked) -> list[Problem]:
    try:
        check_config(_changed(config, asked))
    except ConfigError as error:
        return list(error.problems)
    return []


def _changed(config: "RunConfig", asked: _Asked) -> _Plain:
    data = dump_config(config)
    _split_hybrids(data["roles"], asked)
    moved = _move(data, asked)
    names = _names(data["roles"])
    for duty, style in asked.styles.items():
        role = names.get(duty)
        if role is None:
            data["roles"][duty] = {"pool": _actors_place(data["roles"])["pool"], "colocate": style}
        elif role == duty:  # the duties of a hybrid that was not split are fused, and are asked to be
            data["roles"][role]["colocate"] = style
            moved.append(role)
    _resize(data, asked)
    _follow_fused_neighbours(data["roles"], moved)
    if asked.tensor_parallel is not None and "rollout" in names:
        data["roles"][names["rollout"]]["tensor_parallel"] = asked.tensor_parallel
    for path, number in asked.plain.items():
        section = data
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = number
    _settle_weight_sync(data)
    drop_empty_pools(data)
    return data


def _names(roles: _Plain) -> dict[str, str]:
    """Duty -> role."""
    return {duty: role for role in roles for duty in HYBRID_ROLES.get(role, (role,))}


def _actors_place(roles: _Plain) -> _Plain:
    return roles[_names(roles)["actor"]]


def _split_hybrids(roles: _Plain, asked: _Asked) -> None:
    """A hybrid role stays one while its duties stay together; else those that do are fused."""
    for hybrid in [role for role in roles if role in HYBRID_ROLES]:
        duties = HYBRID_ROLES[hybrid]
        pools = {duty: asked.places.get(duty, roles[hybrid]["pool"]) for duty in duties}
        is_fused = {duty: asked.styles.get(duty, "fused") == "fused" for duty in duties}
        if len(set(pools.values())) == 1 and all(is_fused.values()):
            continue
        place = roles.pop(hybrid)
        for duty in duties:
            mates = [other for other in duties if pools[other] == pools[duty] and is_fused[other]]
            style = "fused" if is_fused[duty] and len(mates) > 1 else "shared"
            roles[duty] = {**place, "colocate": style, "worker": None}


def _move(data: _Plain, asked: _Asked) -> list[str]:
    """Puts roles into their new pools, and says which moved."""
    roles, pools = data["roles"], data["pools"]
    names = _names(roles)
    first_place = _actors_place(roles)["pool"]
    origins: dict[str, list[str]] = {}
    moved: list[str] = []
    # The advantage step stands with the actor until it has a place of its own, so the actor moves first.
    for duty in sorted(asked.places, key="advantage".__eq__):
        pool, role = asked.places[duty], names.get(duty, duty)
        if role not in roles and pool != _actors_place(roles)["pool"]:
            roles[role] = {"pool": first_place}
        if role not in roles or roles[role]["pool"] == pool:
            continue
        origins.setdefault(pool, []).append(roles[role]["pool"])
        roles[role].update(pool=pool, workers=None)
        moved.append(role)
    for pool, sources in origins.items():
        if pool not in pools:
            # A role that needs an accelerator decides what the pool is made of.
            source = next((name for name in sources if pools[name]["accelerator"] != "none"), sources[0])
            pools[pool] = dict(pools[source])
    return moved


def _resize(data: _Plain, asked: _Asked) -> None:
    for name, size in asked.sizes.items():
        pool = data["pools"].get(name)
        if pool is None or size == (sum(pool["nodes"]) if pool["nodes"] else pool["bundles"]):
            continue
        pool.update(nodes=None, bundles=size)
        for place in data["roles"].values():
            if place["pool"] == name:
                place["workers"] = None


def _follow_fused_neighbours(roles: _Plain, changed: list[str]) -> None:
    """One process has one number of workers: who joins fused roles takes theirs."""
    for role in changed:
        place = roles[role]
        if place.get("colocate") == "fused":
            counts = [
                other.get("workers")
                for name, other in roles.items()
                if name not in changed and other["pool"] == place["pool"] and other.get("colocate") == "fused"
            ]
            place["workers"] = counts[0] if counts else place.get("workers")


def _settle_weight_sync(data: _Plain) -> None:
    roles = data["roles"]
    names = _names(roles)
    actor, rollout = roles[names["actor"]], roles[names["rollout"]]
    is_one_process = names["actor"] == names["rollout"] or (
        actor["pool"] == rollout["pool"] and actor["colocate"] == rollout["colocate"] == "fused"
    )
    if data["rollout"]["weight_sync"] == ("process_group" if is_one_process else "in_process"):
        data["rollout"]["weight_sync"] = "auto"


def _with_shared(asked: _Asked, roles: list[str]) -> _Asked:
    return replace(asked, styles={**asked.styles, **dict.fromkeys(roles, "shared")})


def _roles_to_loosen(config: "RunConfig", asked: _Asked, problems: list[Problem]) -> list[str]:
    """Roles whose `colocate: shared` solves problems and makes none: those that moved, then those that are named.

    A style that was asked for stays.
    """
    found: list[str] = []
    if not problems:
        return found
    roles, named = _changed(config, asked)["roles"], {problem.path for problem in problems}
    tied = [
        role
        for role, place in roles.items()
        if role not in HYBRID_ROLES and role not in asked.styles and place.get("colocate", "shared") != "shared"
        and (role in asked.places or f"roles.{role}.colocate" in named)
    ]  # fmt: skip
    left = problems
    for role in sorted(tied, key=lambda role: role not in asked.places):
        without = _refusals(config, _with_shared(asked, [*found, role]))
        if len(without) < len(left) and all(problem in left for problem in without):
            found, left = [*found, role], without
    return found
