"""A smaller cast for `recovery.allow_smaller`: the config with no more bundles taken away than has to be."""

import math
from collections.abc import Collection, Mapping, Sequence

from configs.load import check_config, dump_config
from configs.pools import PoolConfig
from configs.problems import ConfigError
from configs.run import RunConfig
from resources.node_fitting import Entry, Fitting, Shortage, fit_entries, pool_entries
from resources.node_resources import NodeResources

Pools = Mapping[str, PoolConfig]


def shrink(config: RunConfig, pools: Collection[str], nodes: Sequence[NodeResources]) -> RunConfig | None:
    """`config` with fewer bundles in `pools`, whose present ones are too many for what `nodes` have free.

    A bundle is taken away at a time (of an entry of `nodes` as many as are tensor-parallel peers), from the entry that
    does not fit; where pools are in each other's way, from the largest. Roles keep their workers per bundle. None when
    no smaller config fits or is legal: every pool is at its least, or a role's ranks no longer divide.
    """
    units = {name: _peers(config, name) for name in sorted(pools)}
    left: Pools = {}
    for name in units:  # what each could have if it were alone there
        alone = _fitted({name: config.pools[name]}, units, nodes)
        if alone is None:
            return None
        left = {**left, **alone}
    fitted = _fitted(left, units, nodes)
    if fitted is not None and all(fitted[name] == config.pools[name] for name in units):
        fitted = _smaller(fitted, units)  # by these figures it fits, and it could not be had all the same
    return None if fitted is None else _legal(config, fitted, units)


def _peers(config: RunConfig, pool: str) -> int:
    """What divides each entry of the pool's `nodes`, so that no tensor-parallel peers lie on two nodes."""
    return math.lcm(*(where.tensor_parallel for where in config.roles.values() if where.pool == pool))


def _fitted(pools: Pools, units: Mapping[str, int], nodes: Sequence[NodeResources]) -> Pools | None:
    """The pools cut until they fit on what is free."""
    left: Pools | None = pools
    while left is not None:
        found: Fitting | Shortage = fit_entries(
            [entry for name, pool in left.items() for entry in pool_entries(name, pool)], nodes
        )
        if isinstance(found, Fitting):
            return left
        left = _smaller(left, units, found.entry)
    return None


def _smaller(pools: Pools, units: Mapping[str, int], short: Entry | None = None) -> Pools | None:
    """One cut in the largest pool: of the entry that is `short` if it is there, else of the smallest one."""
    able = [name for name in sorted(pools) if pools[name].size > _least(pools[name], units[name])]
    if not able:
        return None
    name = max(able, key=lambda pool: pools[pool].size)
    index = short.index if short is not None and short.pool == name else None
    return {**pools, name: _cut(pools[name], units[name], index)}


def _least(pool: PoolConfig, unit: int) -> int:
    return 1 if pool.nodes is None else unit


def _cut(pool: PoolConfig, unit: int, index: int | None) -> PoolConfig:
    if pool.nodes is None:
        return pool.model_copy(update={"bundles": pool.size - 1})
    counts = list(pool.nodes)
    place = min(range(len(counts)), key=lambda entry: (counts[entry], -entry)) if index is None else index
    counts[place] -= counts[place] % unit or unit
    return pool.model_copy(update={"nodes": tuple(count for count in counts if count > 0)})


def _legal(config: RunConfig, pools: Pools, units: Mapping[str, int]) -> RunConfig | None:
    """The largest legal config found with at most these bundles: smaller in one pool alone, or else in all by turns."""
    whole = _checked(config, pools)
    if whole is not None:
        return whole
    found = [one for name in pools if (one := _first_legal(config, pools, [name], units)) is not None]
    if found:
        return max(found, key=lambda one: sum(one.pools[name].size for name in pools))
    return _first_legal(config, pools, list(pools), units)


def _first_legal(config: RunConfig, pools: Pools, names: list[str], units: Mapping[str, int]) -> RunConfig | None:
    part: Pools | None = {name: pools[name] for name in names}
    while (part := _smaller(part, units)) is not None:
        checked = _checked(config, {**pools, **part})
        if checked is not None:
            return checked
    return None


def _checked(config: RunConfig, pools: Pools) -> RunConfig | None:
    """`config` with these pools and as many workers per bundle; None where a rule says no."""
    plain = dump_config(config)
    for name, pool in pools.items():
        plain["pools"][name] = pool.model_dump(mode="json")
        for role in plain["roles"].values():
            if role["pool"] == name and role.get("workers") is not None:
                role["workers"] = _workers(role["workers"], config.pools[name].size, pool.size)
    try:
        return check_config(plain, config.name)
    except ConfigError:
        return None


def _workers(workers: int, before: int, after: int) -> int:
    """On so many bundles: as many per bundle where there were several, else as many as there is room for."""
    return workers * after // before if workers > before else min(workers, after)
