"""The env role, which rollout workers call themselves: an episode's turns never pass through a step."""

from typing import Any

from tasks.host import host


def environment_options() -> dict[str, Any]:
    """Keyword arguments for the rollout worker's calls: the env role's worker group where the run has one."""
    group = host().groups.get("env")
    return {} if group is None else {"environment": group}
