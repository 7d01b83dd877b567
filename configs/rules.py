"""Rules that span sections of the configuration. Each is a small function that yields a Problem per breach.

All breaches are told at once. A rule assumes nothing that an earlier stage checks: roles and pools come first, and
the rest is asked only when those hold.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs import (
    address_rules,
    batch_rules,
    engine_rules,
    parallel_rules,
    role_rules,
    source_rules,
    teacher_rules,
)
from configs.layout import HYBRID_ROLES, duties
from configs.problems import ConfigError, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

__all__ = ["HYBRID_ROLES", "STAGES", "check_rules", "duties"]

Rule = Callable[["RunConfig"], Iterator[Problem]]

STAGES: tuple[tuple[Rule, ...], ...] = (
    role_rules.FIRST,
    (
        *role_rules.RULES,
        *parallel_rules.RULES,
        *batch_rules.RULES,
        *source_rules.RULES,
        *address_rules.RULES,
        *engine_rules.RULES,
        *teacher_rules.RULES,
    ),
)


def check_rules(config: "RunConfig") -> None:
    """Raise ConfigError with every breach of the first stage that has any."""
    for stage in STAGES:
        problems = [problem for rule in stage for problem in rule(config)]
        if problems:
            raise ConfigError("config", problems)
