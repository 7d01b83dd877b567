"""Placement groups with a deadline: made, watched while pending, and removed again when anything fails half-way."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.exceptions import RaySystemError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from resources.inventory import live_nodes, shortage_table
from resources.node_resources import ACCELERATOR_TYPE_LABEL

_POLL_SECONDS = 0.25
_INFEASIBLE_SECONDS = 1.0
_REMOVAL_SECONDS = 10.0


class PoolError(ValueError):
    """A pool that cannot be had: what was wanted, what each node has free, and who holds the rest."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One placement group to make."""

    name: str
    label: str
    """For messages: "pool main, node entry 0"."""
    bundles: tuple[Mapping[str, float], ...]
    strategy: str
    node_id: str | None = None
    """Pin: the node that preflight chose (its IP is a resource of the first bundle already)."""
    accelerator_type: str | None = None
    is_detached: bool = False


def reserve_groups(requests: Sequence[GroupRequest], deadline_seconds: float) -> list[PlacementGroup]:
    """Make all placement groups and wait until every one of them stands.

    Those with a node of their own come first: the others would else be put where one of them has to go.

    Raises PoolError with the table when one cannot be placed, or is not by the deadline; nothing stays reserved then.
    """
    made: dict[int, PlacementGroup] = {}
    is_complete = False
    began = time.monotonic()
    try:
        for is_pinned in (True, False):
            part = [index for index, request in enumerate(requests) if (request.node_id is not None) is is_pinned]
            for index in part:
                made[index] = _create(requests[index])
            _await_groups([requests[i] for i in part], [made[i] for i in part], deadline_seconds, began)
        is_complete = True
        return [made[index] for index in range(len(requests))]
    finally:
        if not is_complete:
            release_groups(list(made.values()))


def release_groups(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups and wait until they are gone."""
    for group in groups:
        remove_placement_group(group)
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while any(_state(group) != "REMOVED" for group in groups):
        if time.monotonic() > deadline:
            left = [group.id.hex() for group in groups if _state(group) != "REMOVED"]
            raise PoolError(f"placement groups {left} were not removed within {_REMOVAL_SECONDS:g} s")
        time.sleep(0.02)


def _create(request: GroupRequest) -> PlacementGroup:
    selector: dict[str, str] = {}
    if request.node_id is not None:
        selector["ray.io/node-id"] = request.node_id
    if request.accelerator_type is not None:
        selector[ACCELERATOR_TYPE_LABEL] = request.accelerator_type
    try:
        return placement_group(
            [dict(bundle) for bundle in request.bundles],
            strategy=request.strategy,
            name=request.name,
            lifetime="detached" if request.is_detached else None,
            bundle_label_selector=[selector] * len(request.bundles),
        )
    except RaySystemError as error:
        raise PoolError(f"{request.label}: Ray refused the placement group {request.name!r}: {error}") from error


def _state(group: PlacementGroup) -> str:
    table = placement_group_table(group)
    return "REMOVED" if not table else str(table["state"])


def _await_groups(
    requests: Sequence[GroupRequest], groups: Sequence[PlacementGroup], deadline_seconds: float, began: float
) -> None:
    infeasible_since: dict[int, float] = {}
    waiting = list(range(len(groups)))
    while waiting:
        waiting = [index for index in waiting if not groups[index].wait(0)]
        if not waiting:
            return
        now = time.monotonic()
        for index in waiting:
            state = placement_group_table(groups[index])["stats"]["scheduling_state"]
            if state != "INFEASIBLE":
                infeasible_since.pop(index, None)
            elif now - infeasible_since.setdefault(index, now) >= _INFEASIBLE_SECONDS:
                raise PoolError(_explain([requests[index]], "can never be placed on this cluster (Ray: INFEASIBLE)"))
        if now - began >= deadline_seconds:
            late = [requests[index] for index in waiting]
            raise PoolError(_explain(late, f"not placed within the deadline of {deadline_seconds:g} s"))
        groups[waiting[0]].wait(_POLL_SECONDS)


def _explain(requests: Sequence[GroupRequest], what: str) -> str:
    nodes = live_nodes()
    wanted = {
        f"{request.label}, {len(request.bundles)} bundles {request.strategy}, each": request.bundles[-1]
        for request in requests
    }
    labels = ", ".join(request.label for request in requests)
    return f"{labels}: {what}\n{shortage_table(wanted, nodes)}"
