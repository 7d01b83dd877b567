"""Worker groups: the callable side of a role, the same whether it shares its processes, its bundles or nothing.

A group splits the arguments of a call, sends them to its ranks, and joins what they answer. It can be pickled, or found
by name, and then works from any process of the cluster; only the process that made it may restart or end it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from resources.attachment import AttachedProcesses, GroupCard, read_group_card, write_group_card
from resources.call_plan import is_simple, plan_call
from resources.dispatch import Dispatch, Topology, dispatch
from resources.failures import Failure, WorkerFailed
from resources.pending_call import PendingCall
from resources.pools import ResourcePool
from resources.processes import Processes
from resources.registry import read_card
from resources.short_calls import short_keys, short_name
from resources.worker_process import ANSWERS, HEADER, PRIVATE
from resources.worker_spec import Home, WorkerSpec

Colocation = Literal["fused", "shared", "split"]

_ORDERS: dict[tuple[str, str], threading.Lock] = {}
"""(run, processes) -> lock around the sending of one call to all ranks. Threads of a task host call fused roles side by
side; ranks that got two calls in different orders would meet in different collectives, which aborts them."""


class WorkerGroup:
    """The workers of one role, in rank order."""

    def __init__(self, processes: "Processes | AttachedProcesses", card: GroupCard) -> None:
        """Use `start_group`, `start_groups`, or `WorkerGroup.attach`."""
        self._processes = processes
        self._card = card
        self._keys = {name: f"{card.role}.{name}".encode() for name in card.methods}
        self._everyone = [True] * card.topology.world_size
        self._order = _ORDERS.setdefault((card.facts.run_id, card.facts.name), threading.Lock())
        self._simple = {name for name, info in card.methods.items() if is_simple(info)}
        self._plain: list[Callable[..., Any]] = []
        self._bulk: list[Callable[..., Any]] = []
        self._short: dict[str, list[Callable[..., Any]]] = {}
        self._wire(processes.actors)

    # --- facts ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self._card.name

    @property
    def role(self) -> str:
        """The role these workers play."""
        return self._card.role

    @property
    def pool(self) -> str:
        """Name of the resource pool."""
        return self._processes.facts.pool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._card.topology.world_size

    @property
    def topology(self) -> Topology:
        """World size and mesh."""
        return self._card.topology

    @property
    def processes(self) -> "Processes | AttachedProcesses":
        """What it speaks through; fused roles share one object."""
        return self._processes

    @property
    def incarnation(self) -> int:
        """How often the processes have been started; calls carry it and a stale one is refused."""
        return self._processes.facts.incarnation

    @property
    def clock_offset(self) -> float:
        """The controller's monotonic clock less this process's."""
        return self._processes.clock_offset

    @property
    def call_seconds(self) -> float:
        """Deadline of a call that gives none."""
        return self._card.call_seconds

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Rank, node and pid of every worker."""
        return [
            {
                "rank": rank.rank,
                "node": rank.node_ip,
                "node_id": rank.node_id,
                "pid": rank.pid,
                "log_file": rank.log_file,
            }
            for rank in self._processes.facts.ranks
        ]

    @property
    def start_skew_seconds(self) -> float:
        """Time between the first and the last rank to begin its constructors."""
        return self._processes.start_skew_seconds

    @property
    def failure(self) -> Failure | None:
        """The first failure of this incarnation, if the group is unusable."""
        return self._processes.failure

    # --- calls ----------------------------------------------------------------------------------------------------

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a marked method on the ranks its dispatch names, and join the answers.

        `timeout` is the call's deadline in seconds. A method marked `blocking=False` gives a `PendingCall`.
        Raises WorkerFailed, CallTimeout or StaleGroup; ValueError for arguments that do not fit.
        """
        pending = self.submit(method, *args, timeout=timeout, **kwargs)
        return pending.result() if self._card.methods[method].marking.blocking else pending

    def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> PendingCall:
        """Like `call`, without waiting."""
        info = self._card.methods.get(method)
        if info is None:
            raise ValueError(
                f"role {self.role} has no dispatched method {method!r}; it has {sorted(self._card.methods)}"
            )
        if self._processes.failure is not None:
            raise WorkerFailed(self._processes.failure)
        senders = self._bulk if info.marking.bulk else self._plain
        submitted = time.monotonic() + self._processes.clock_offset
        head = (submitted, self._processes.facts.incarnation)
        key = self._keys[method]
        if method in self._simple and not args and not kwargs:
            # Nothing to plan: this path is what an empty call costs.
            short = self._short.get(method)
            header = () if short else (HEADER.pack(*head, ANSWERS) + key,)
            with self._order:
                sent = [send(*header) for send in short or senders]
            answering = self._everyone
        else:
            plan = plan_call(info, self._card.topology, args, kwargs, ray.put)
            answering = plan.answering
            private = 0 if plan.has(ray.ObjectRef) else PRIVATE
            headers = [HEADER.pack(*head, private) + key, HEADER.pack(*head, private | ANSWERS) + key]
            with self._order:
                sent = [
                    send(headers[answers], *arguments, **named)
                    for send, (arguments, named), answers in zip(senders, plan.arguments, answering, strict=False)
                ]
        seconds = self._card.call_seconds if timeout is None else timeout
        return PendingCall(self._processes, self._card.topology, info, sent, answering, submitted, seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """`group.method(...)` is `group.call("method", ...)`."""
        if name.startswith("_") or name not in self._card.methods:
            raise AttributeError(f"worker group has no attribute or dispatched method {name!r}")
        bound = partial(self.call, name)
        self.__dict__[name] = bound
        return bound

    # --- life -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start every process of the group again, with a new incarnation and store; fused roles restart together."""
        self._owned("restart").restart()
        for group in self._processes.views:
            group._wire(self._processes.actors)
            group._publish(is_new=False)

    def shutdown(self) -> None:
        """End the group's processes and give its bundles back."""
        self._owned("shutdown").stop()

    @classmethod
    def attach(cls, run_id: str, name: str) -> "WorkerGroup":
        """The group of that name in a running run, from any process. Raises ValueError if there is none."""
        card = read_group_card(run_id, name)
        actors = [ray.get_actor(rank.actor_name, namespace=run_id) for rank in card.facts.ranks]
        return cls(AttachedProcesses(card.facts, actors, card.start_skew_seconds), card)

    def __reduce__(self) -> tuple[Callable[..., "WorkerGroup"], tuple[GroupCard, list[ActorHandle]]]:
        return _attach_by_handle, (self._current_card(), list(self._processes.actors))

    def _wire(self, actors: Sequence[ActorHandle]) -> None:
        self._plain = [actor.call.remote for actor in actors]
        self._short = {
            key.removeprefix(f"{self.role}."): [getattr(actor, short_name(number)).remote for actor in actors]
            for number, key in enumerate(self._card.short_keys)
            if key.startswith(f"{self.role}.")
        }
        self._bulk = [actor.call.options(num_returns=2).remote for actor in actors]

    def _owned(self, action: str) -> Processes:
        if isinstance(self._processes, Processes):
            return self._processes
        raise ValueError(
            f"{action} of worker group {self.name} from a process that only attached to it; "
            "the controller that started it does that"
        )

    def _current_card(self) -> GroupCard:
        return self._card.with_facts(self._processes.facts, self._processes.start_skew_seconds)

    def _publish(self, is_new: bool) -> None:
        if not write_group_card(self._current_card(), is_new):
            raise _name_taken(self._processes.facts.run_id, self.name)


def start_group(
    home: Home, pool: ResourcePool, spec: WorkerSpec, name: str | None = None, bundles: Sequence[int] | None = None
) -> WorkerGroup:
    """Start the workers of one role: one per bundle of the pool, or one per entry of `bundles` (rank -> bundle).

    Raises WorkerFailed, PoolError or ValueError; nothing stays then.
    """
    return _start(home, pool, [spec], name or spec.role, 1.0, [name or spec.role], bundles)[0]


def start_groups(
    home: Home,
    pool: ResourcePool,
    specs: Sequence[WorkerSpec],
    colocate: Colocation,
    bundles: Sequence[int] | None = None,
) -> dict[str, WorkerGroup]:
    """Start several roles on one pool: `fused` in one process per bundle, `shared` in a process each.

    `split` is for roles alone on their bundles, so it takes one spec. If one role does not start, none stays.
    """
    roles = [spec.role for spec in specs]
    if len(set(roles)) != len(roles):
        raise ValueError(
            f"roles {roles} name one twice; a pool hosts a role once (name the groups with start_group(name=...))"
        )
    if colocate == "split" and len(specs) > 1:
        raise ValueError(f"roles {roles} are split, which means a pool each, but all are cast onto pool {pool.name}")
    if colocate == "fused":
        groups = _start(home, pool, specs, "+".join(roles), 1.0, roles, bundles)
        return dict(zip(roles, groups, strict=True))
    started: dict[str, WorkerGroup] = {}
    try:
        for spec in specs:
            started[spec.role] = _start(home, pool, [spec], spec.role, 1.0 / len(specs), [spec.role], bundles)[0]
    finally:
        if len(started) < len(specs):
            for group in started.values():
                group.shutdown()
    return started


def _start(
    home: Home,
    pool: ResourcePool,
    specs: Sequence[WorkerSpec],
    name: str,
    share: float,
    names: Sequence[str],
    bundles: Sequence[int] | None,
) -> list[WorkerGroup]:
    for view in names:
        if read_card("group", home.run_id, view) is not None:
            raise _name_taken(home.run_id, view)
    processes = Processes(home, pool, name, specs, share, bundles)
    short = short_keys((spec.role, method) for spec in specs for method in processes.methods[spec.role].values())
    cards = [
        GroupCard(
            name=view,
            role=spec.role,
            facts=processes.facts,
            methods=processes.methods[spec.role],
            short_keys=tuple(short),
            topology=Topology(role=spec.role, world_size=len(processes.bundles), mesh=spec.mesh),
            call_seconds=spec.call_seconds,
            start_skew_seconds=0.0,
        )
        for view, spec in zip(names, specs, strict=True)
    ]
    processes.start()
    groups = [WorkerGroup(processes, card) for card in cards]
    home.adopt(processes)
    try:
        for group in groups:
            group._publish(is_new=True)
            processes.views.append(group)
    finally:
        if len(processes.views) < len(groups):
            processes.stop()
    return groups


def _name_taken(run_id: str, name: str) -> ValueError:
    return ValueError(f"run {run_id} has a worker group named {name!r} already; names are unique in a run")


def _attach_by_handle(card: GroupCard, actors: list[ActorHandle]) -> WorkerGroup:
    return WorkerGroup(AttachedProcesses(card.facts, actors, card.start_skew_seconds), card)


__all__ = [
    "Colocation",
    "Dispatch",
    "PendingCall",
    "WorkerGroup",
    "WorkerSpec",
    "dispatch",
    "start_group",
    "start_groups",
]
