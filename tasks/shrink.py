"""A smaller cast: the config with one bundle less in the largest of some pools, for `recovery.allow_smaller`."""

from collections.abc import Collection
from typing import Any

from configs.load import check_config, dump_config
from configs.problems import ConfigError
from configs.run import RunConfig


def shrink(config: RunConfig, pools: Collection[str]) -> RunConfig | None:
    """`config` with the largest of `pools` one step smaller: an entry of `nodes` less, or a bundle less.

    Roles there keep their workers per bundle. None when no smaller config is legal (every pool is at one bundle, or
    a role's ranks no longer divide).
    """
    plain = dump_config(config)
    while True:
        able = [name for name in sorted(pools) if _steps(plain["pools"][name]) > 1]
        if not able:
            return None
        name = max(able, key=lambda pool: _size(plain["pools"][pool]))
        before = _size(plain["pools"][name])
        _cut(plain["pools"][name])
        after = _size(plain["pools"][name])
        for role in plain["roles"].values():
            if role["pool"] == name and role.get("workers") is not None:
                role["workers"] = max(1, role["workers"] * after // before)
        try:
            return check_config(plain, config.name)
        except ConfigError:
            continue  # a legal one may be smaller still


def _steps(pool: dict[str, Any]) -> int:
    return len(pool["nodes"]) if pool.get("nodes") else int(pool["bundles"])


def _size(pool: dict[str, Any]) -> int:
    return sum(pool["nodes"]) if pool.get("nodes") else int(pool["bundles"])


def _cut(pool: dict[str, Any]) -> None:
    if pool.get("nodes"):
        pool["nodes"] = list(pool["nodes"])[:-1]
    else:
        pool["bundles"] = int(pool["bundles"]) - 1
