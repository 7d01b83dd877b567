"""Reaching a worker group from a process that did not start it: the card it publishes, and what a reader gets."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.cloudpickle import dumps, loads  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

from resources.diagnosis import await_evidence
from resources.dispatch import MethodInfo, Topology
from resources.failures import Failure, GroupFacts
from resources.process_facts import host_identity
from resources.registry import list_cards, read_card, write_card
from resources.supervisor_link import ask_supervisor

_CLOCK_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class GroupCard:
    """Everything a caller in another process needs, besides the handles."""

    name: str
    role: str
    facts: GroupFacts
    methods: dict[str, MethodInfo]
    short_keys: tuple[str, ...]
    """See resources/short_calls.py."""
    topology: Topology
    call_seconds: float
    start_skew_seconds: float

    def with_facts(self, facts: GroupFacts, start_skew_seconds: float) -> "GroupCard":
        """The card of the present incarnation."""
        return replace(self, facts=facts, start_skew_seconds=start_skew_seconds)


class AttachedProcesses:
    """Processes that another process owns; their failures are asked of, and reported to, its supervisor."""

    views: Sequence[Any] = ()

    def __init__(self, facts: GroupFacts, actors: list[ActorHandle], start_skew_seconds: float) -> None:
        self.facts = facts
        self.actors = actors
        self.start_skew_seconds = start_skew_seconds
        self.failure: Failure | None = None
        self.clock_offset = _measure_clock_offset(facts)

    def release_peers(self, failure: Failure) -> Failure:
        """Report the failure first, so that the owner knows the cause before it sees processes end."""
        self.failure = ask_supervisor(self.facts, failure) or failure
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        return self.failure

    def evidence(self, timeout: float) -> Failure | None:
        """What the owner knows of a death."""
        return await_evidence(lambda: ask_supervisor(self.facts, None), timeout)

    def newest_incarnation(self) -> int:
        """What the cards of the run say; a restart writes a new one."""
        run_id = self.facts.run_id
        cards = [read_group_card(run_id, name) for run, name in list_cards("group", run_id) if run == run_id]
        return max((card.facts.incarnation for card in cards if card.facts.name == self.facts.name), default=0)

    def log_tail(self, rank: int) -> list[str]:
        """Only the owner hears the beats."""
        return []

    def running(self) -> list[tuple[str | None, float]]:
        """Only the owner hears the beats."""
        return []


def _measure_clock_offset(facts: GroupFacts) -> float:
    """Controller's monotonic clock minus this process's; they are one clock on one host."""
    if facts.controller_host == host_identity():
        return 0.0
    asked = time.monotonic()
    with socket.create_connection(facts.supervisor, timeout=_CLOCK_SECONDS) as connection:
        connection.sendall(json.dumps({"token": facts.token, "group": facts.name}).encode() + b"\n")
        now = float(json.loads(connection.makefile("rb").readline())["now"])
    return now - (asked + time.monotonic()) / 2


def write_group_card(card: GroupCard, is_new: bool) -> bool:
    """Publish; False when the name is taken."""
    return write_card("group", card.facts.run_id, card.name, dumps(card), is_new)


def read_group_card(run_id: str, name: str) -> GroupCard:
    """The card of a running group. Raises ValueError naming the groups there are."""
    found = read_card("group", run_id, name)
    if found is None:
        known = [group for _, group in list_cards("group", run_id)]
        raise ValueError(f"run {run_id!r} has no worker group {name!r} on this cluster; it has {known or 'none'}")
    return loads(found)
