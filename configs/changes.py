"""Changes that a report recommends, tried on the run's own config: what the rules refuse is not recommended."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from configs.layout import HYBRID_ROLES, duties

if TYPE_CHECKING:
    from configs.run import RunConfig

Change = Callable[["RunConfig", dict[str, Any]], bool]
"""Makes the change in plain data; False where there is nothing left to change."""
_ROLLOUT_POOL = "rollout-alone"


def refused_changes(config: "RunConfig") -> tuple[str, ...]:
    """Names of `CHANGES` that this config refuses, or that it has made already."""
    return tuple(name for name, change in CHANGES.items() if not _is_accepted(config, change))


def _is_accepted(config: "RunConfig", change: Change) -> bool:
    data = config.model_dump(mode="json")
    if not change(config, data):
        return False
    drop_empty_pools(data)
    try:
        type(config).model_validate(data)
    except ValidationError:
        return False
    return True


def drop_empty_pools(data: dict[str, Any]) -> None:
    """Of a config in plain data: pools in which no role stands."""
    used = {role["pool"] for role in data["roles"].values()}
    data["pools"] = {name: pool for name, pool in data["pools"].items() if name in used}


def _run_ahead(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["async_depth"] = 1
    return config.async_depth == 0


def _run_ahead_apart(config: "RunConfig", data: dict[str, Any]) -> bool:
    """The rollout on a pool of its own, as large and as fast as the one it stands in."""
    role = duties(config)["rollout"]
    place = data["roles"].pop(role)
    for duty in HYBRID_ROLES.get(role, ()):
        data["roles"][duty] = {**place, "colocate": "shared", "worker": None}
    data["roles"]["rollout"] = {**place, "colocate": "shared", "pool": _ROLLOUT_POOL, "worker": None}
    data["pools"][_ROLLOUT_POOL] = dict(data["pools"][place["pool"]])
    data["rollout"]["weight_sync"] = "auto"
    return _run_ahead(config, data)


def _run_ahead_moved(config: "RunConfig", data: dict[str, Any]) -> bool:
    """As `_run_ahead_apart` where no other key has to change: no hybrid role, no weights handed over in the process."""
    is_free = "rollout" in config.roles and config.rollout.weight_sync != "in_process"
    return is_free and _run_ahead_apart(config, data)


def _process_group(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["rollout"]["weight_sync"] = "process_group"
    return config.rollout.weight_sync != "process_group"


def _fuse(config: "RunConfig", data: dict[str, Any]) -> bool:
    """Actor and rollout in one process, their weights handed over in it."""
    actor, rollout = duties(config)["actor"], duties(config)["rollout"]
    place = {**data["roles"][actor], "colocate": "fused"}
    data["roles"][actor] = place
    data["roles"][rollout] = {**place, "worker": data["roles"][rollout]["worker"]}
    data["rollout"]["weight_sync"] = "in_process"
    return actor != rollout and config.roles[rollout] != config.roles[actor].model_copy(update={"colocate": "fused"})


def _reward_workers(config: "RunConfig", data: dict[str, Any]) -> bool:
    where = config.roles["reward"]
    data["roles"]["reward"]["workers"] = 2 * (where.workers or config.pools[where.pool].size)
    return True


def _fewer_engines(config: "RunConfig", data: dict[str, Any]) -> bool:
    role = duties(config)["rollout"]
    workers = config.roles[role].workers or config.pools[config.roles[role].pool].size
    data["roles"][role]["workers"] = workers // 2
    return workers > 1


def _tensor_parallel(config: "RunConfig", data: dict[str, Any]) -> bool:
    if "rollout" not in config.roles:  # a hybrid: the actor would be cut with it
        return False
    data["roles"]["rollout"]["tensor_parallel"] *= 2
    return True


def _shorter_responses(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["rollout"]["max_response_length"] = max(1, config.rollout.max_response_length * 3 // 4)
    return config.rollout.max_response_length > 1


def _no_critic(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["algorithm"]["name"] = "grpo"
    data["rollout"]["group_size"] = max(2, config.rollout.group_size)
    return data["roles"].pop("critic", None) is not None


def _no_reference(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["algorithm"]["kl"]["coef"] = 0.0
    return data["roles"].pop("reference", None) is not None


def _reference_to_the_actor(config: "RunConfig", data: dict[str, Any]) -> bool:
    where, pool = data["roles"].get("reference"), config.roles[duties(config)["actor"]].pool
    if where is None or where["pool"] == pool:
        return False
    where.update(pool=pool, colocate="shared")
    return True


def _fewer_epochs(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["algorithm"]["num_ppo_epochs"] = config.algorithm.num_ppo_epochs - 1
    return config.algorithm.num_ppo_epochs > 1


def _running_server(config: "RunConfig", data: dict[str, Any]) -> bool:
    data["prefect"]["api_url"] = "http://127.0.0.1:4200/api"
    return config.prefect.api_url is None


CHANGES: Mapping[str, Change] = {
    "ahead": _run_ahead,
    "ahead_apart": _run_ahead_apart,
    "ahead_moved": _run_ahead_moved,
    "process_group": _process_group,
    "fuse": _fuse,
    "reward_workers": _reward_workers,
    "fewer_engines": _fewer_engines,
    "tensor_parallel": _tensor_parallel,
    "shorter_responses": _shorter_responses,
    "no_critic": _no_critic,
    "no_reference": _no_reference,
    "reference_to_the_actor": _reference_to_the_actor,
    "fewer_epochs": _fewer_epochs,
    "running_server": _running_server,
}
