"""Rules that span sections of the configuration; each names the value, the rule and the way out."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.run import RunConfig

HYBRID_ROLES = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_reference": ("actor", "rollout", "reference"),
}
"""A hybrid role is one process that does the duties of several."""


def check_rules(config: "RunConfig") -> None:
    """Raise ValueError at the first breach."""
    _roles_and_pools(config)
    _needed_roles(config)
    _groups(config)


def duties(config: "RunConfig") -> dict[str, str]:
    """Duty -> the role of the config that does it, hybrids unfolded."""
    table: dict[str, str] = {}
    for role in config.roles:
        for duty in HYBRID_ROLES.get(role, (role,)):
            if duty in table:
                raise ValueError(f"roles {table[duty]!r} and {role!r} both do the duty {duty!r}; name it once")
            table[duty] = role
    return table


def _roles_and_pools(config: "RunConfig") -> None:
    for role, placed in config.roles.items():
        if placed.pool not in config.pools:
            raise ValueError(
                f"roles.{role}.pool is {placed.pool!r}, which is no pool; pools are {sorted(config.pools)}"
            )
    used = {placed.pool for placed in config.roles.values()}
    idle = sorted(set(config.pools) - used)
    if idle:
        raise ValueError(f"pools {idle} have no role; give each a role or remove it")


def _needed_roles(config: "RunConfig") -> None:
    present = set(duties(config))
    needed = {"actor", "rollout", "reward"}
    if config.algorithm.needs_critic:
        needed.add("critic")
    if config.algorithm.needs_reference and config.model.lora is None:
        needed.add("reference")
    missing = sorted(needed - present)
    if missing:
        raise ValueError(
            f"roles {missing} are needed by algorithm {config.algorithm.name!r} and stand in no pool; add roles.<role>.pool"
        )


def _groups(config: "RunConfig") -> None:
    if config.algorithm.is_group_relative and config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {config.rollout.group_size}; {config.algorithm.name} needs at least 2, since a lone response has zero advantage"
        )
    rows, minis = config.rows_per_iteration, config.algorithm.num_mini_batches
    if rows % minis:
        near = [n for n in range(max(1, minis - 8), minis + 9) if rows % n == 0]
        raise ValueError(
            f"{rows} rows an iteration do not divide into algorithm.num_mini_batches = {minis}; near values that do: {near}"
        )
