"""The controller's side of supervision: tells dead, stopped and busy workers apart and keeps the first failure.

Dead: its process is gone, or its node is; of another node that is asked once the socket closed or no beats come.
Stopped: ten seconds without a beat and without CPU time gained. Busy is neither; it ends at the call's own deadline.
Nothing here waits on a call.
"""

import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from resources.failures import Failure, GroupFacts, RankFacts, death_kind
from resources.heartbeat import read_tail
from resources.process_facts import cpu_seconds, cpu_seconds_of, host_identity, is_running, memory_kills
from resources.ray_state import alive_nodes, is_actor_dead, is_node_alive
from resources.supervisor_link import Link, parse_line, shows

STOPPED_SECONDS = 10.0
_SUSPECT_SECONDS = 2.5
_TICK_SECONDS = 0.25
_NODES_SECONDS = 1.0
"""Which nodes are alive is asked so often while a rank is silent, for all ranks together."""
_FROZEN_SECONDS = 3.0
_CPU_STEP_SECONDS = 0.011
_HELLO_SECONDS = 10.0
"""A connection that has not shown the secret by then is closed."""
_NO_ROOM_SECONDS = 1.0
"""Without a free file descriptor nobody is let in; those who wait are asked in again after this."""
_log = logging.getLogger(__name__)

GroupKey = tuple[str, int]


@dataclass
class _RankState:
    facts: RankFacts
    beat_at: float
    memory_kills: tuple[int, int]
    """The kernel's count at the beat before the last one, and at the last one."""
    tail: list[str] = field(default_factory=list)
    running: str | None = None
    exit_code: int | None = None
    signal_name: str | None = None
    lost_at: float | None = None
    cpu: float | None = None
    cpu_since: float | None = None
    is_over: bool = False


@dataclass
class _Watch:
    facts: GroupFacts
    on_failure: Callable[[Failure], None]
    ranks: list[_RankState]
    failure: Failure | None = None


class Supervisor:
    """Watches the groups of this process. One thread, one socket; every connection shows the run's secret first."""

    def __init__(self, host: str, stopped_after_seconds: float = STOPPED_SECONDS) -> None:
        self._stopped_after = stopped_after_seconds
        self.token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0), backlog=256)
        self._server.setblocking(False)
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self._host = host_identity()
        self._lock = threading.RLock()
        self._watches: dict[GroupKey, _Watch] = {}
        self._kept: dict[GroupKey, Failure] = {}
        self._incarnations: Counter[str] = Counter()
        self._probes: dict[str, Any] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._nodes: Collection[str] = ()
        self._nodes_at = float("-inf")
        self._is_closing = False
        self._last_kills = 0
        self._selector = selectors.DefaultSelector()
        self._open_door()
        self._thread = threading.Thread(target=self._run, name="callsheet-supervisor", daemon=True)
        self._thread.start()

    def next_incarnation(self, name: str) -> int:
        """1, 2, ... per name: never given twice in a run, not even to another group of that name."""
        with self._lock:
            self._incarnations[name] += 1
            return self._incarnations[name]

    def watch(self, facts: GroupFacts, on_failure: Callable[[Failure], None]) -> None:
        """Begin to watch an incarnation; `on_failure` is called once, in the thread of the supervisor or of `keep`."""
        now, kills = time.monotonic(), self._memory_kills()
        ranks = [_RankState(facts=rank, beat_at=now, memory_kills=(kills, kills)) for rank in facts.ranks]
        with self._lock:
            self._watches[facts.name, facts.incarnation] = _Watch(facts, on_failure, ranks)

    def forget(self, facts: GroupFacts) -> None:
        """Stop watching; the end of its processes is no failure any more."""
        with self._lock:
            self._watches.pop((facts.name, facts.incarnation), None)

    def keep(self, failure: Failure) -> Failure:
        """Record a failure unless the incarnation has one, and tell its owner; returns the one that is kept."""
        key = (failure.group, failure.incarnation)
        with self._lock:
            is_first = key not in self._kept
            kept = self._kept.setdefault(key, failure)
            watch = self._watches.get(key)
            if watch is not None:
                watch.failure = kept
        if is_first and watch is not None:
            watch.on_failure(kept)
        return kept

    def kept(self, name: str, incarnation: int) -> Failure | None:
        """The first failure of an incarnation, if there was one."""
        with self._lock:
            return self._kept.get((name, incarnation))

    def tail(self, name: str, incarnation: int, rank: int) -> list[str]:
        """The last log lines that rode on a beat."""
        with self._lock:
            watch = self._watches.get((name, incarnation))
            return [] if watch is None else list(watch.ranks[rank].tail)

    def running(self, name: str, incarnation: int) -> list[tuple[str | None, float]]:
        """(running call, seconds since the last beat) per rank."""
        now = time.monotonic()
        with self._lock:
            watch = self._watches.get((name, incarnation))
            return [] if watch is None else [(rank.running, now - rank.beat_at) for rank in watch.ranks]

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` in the supervisor's thread after a while."""
        with self._lock:
            self._later.append((time.monotonic() + seconds, action))

    def close(self) -> None:
        """Stop the thread and close every connection; workers that are not detached then end themselves."""
        self._is_closing = True
        self._thread.join(timeout=5.0)
        self._server.close()  # it is not among the selector's while there is no room for connections
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked = time.monotonic()
        while not self._is_closing:
            for key, _ in self._selector.select(timeout=_TICK_SECONDS):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - ticked > _FROZEN_SECONDS:
                self._forgive()
            if now - ticked >= _TICK_SECONDS or now < ticked:
                ticked = now
                self._tick(now)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            _log.warning("a connection could not be accepted: %s", error)
            # It stays at the door; looking at it in a loop would keep a core busy.
            self._selector.unregister(self._server)
            self.call_later(_NO_ROOM_SECONDS, self._open_door)
            return
        connection.settimeout(1.0)
        self._selector.register(connection, selectors.EVENT_READ, Link(connection))

    def _open_door(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)

    def _read(self, link: "Link") -> None:
        lines = link.lines()
        try:
            is_over = lines is None or not all(self._hear(link, line) for line in lines)
        except (LookupError, TypeError, ValueError):
            _log.exception("a message that makes no sense; its connection is closed")
            is_over = True
        if is_over:
            self._close(link)

    def _close(self, link: "Link") -> None:
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.hello is not None and "rank" in link.hello:
            state = self._state_of(link.hello)
            if state is not None:
                state.lost_at = time.monotonic()

    def _close_silent(self, now: float) -> None:
        links = [key.data for key in self._selector.get_map().values() if isinstance(key.data, Link)]
        for link in links:
            if link.hello is None and now - link.opened_at >= _HELLO_SECONDS:
                self._close(link)

    def _hear(self, link: "Link", line: bytes) -> bool:
        """Act on one line; False closes the connection. Raises LookupError, TypeError or ValueError for nonsense."""
        message = parse_line(line)
        if message is None:
            return False
        if link.hello is None:
            if not shows(message, self.token):
                return False
            answer = self._answer(message)
            link.hello = message
            return link.reply(answer)
        state = self._state_of(link.hello)
        if state is not None:
            state.beat_at = time.monotonic()
            state.memory_kills = (state.memory_kills[1], self._memory_kills())
            state.lost_at = state.cpu = state.cpu_since = None
            state.tail = message.get("tail", state.tail)
            state.running = message.get("running")
            state.exit_code = message.get("exit", state.exit_code)
            state.signal_name = message.get("signal", state.signal_name)
        return True

    def _answer(self, hello: dict[str, Any]) -> dict[str, Any]:
        if "report" in hello and hello["report"] is not None:
            return {"failure": self.keep(Failure.from_json(hello["report"])).to_json()}
        if "report" in hello:
            kept = self.kept(hello["group"], hello["incarnation"])
            return {"failure": None if kept is None else kept.to_json()}
        self._state_of(hello)
        return {"now": time.monotonic()}

    def _state_of(self, hello: dict[str, Any]) -> _RankState | None:
        with self._lock:
            watch = self._watches.get((hello.get("group", ""), hello.get("incarnation", -1)))
            return None if watch is None else watch.ranks[hello["rank"]]

    def _forgive(self) -> None:
        """This process itself was frozen; nobody's silence counts."""
        with self._lock:
            for watch in self._watches.values():
                for state in watch.ranks:
                    state.beat_at, state.cpu, state.cpu_since = time.monotonic(), None, None

    def _tick(self, now: float) -> None:
        self._close_silent(now)
        with self._lock:
            watches = list(self._watches.values())
            due = [action for at, action in self._later if at <= now]
            self._later = [(at, action) for at, action in self._later if at > now]
        for watch in watches:
            for state in watch.ranks:
                if watch.failure is None and not state.is_over:
                    self._look(watch, state, now)
        for action in due:
            action()

    def _look(self, watch: _Watch, state: _RankState, now: float) -> None:
        try:
            self._check(watch, state, now)
        except OSError as error:  # no descriptor for /proc or the rank's log: it is looked at again with the next tick
            _log.warning("rank %d of %s could not be looked at: %s", state.facts.rank, watch.facts.name, error)

    def _memory_kills(self) -> int:
        try:
            self._last_kills = memory_kills()
        except OSError as error:
            _log.warning("the kernel's count of memory kills could not be read: %s", error)
        return self._last_kills

    def _check(self, watch: _Watch, state: _RankState, now: float) -> None:
        if state.exit_code is not None or state.signal_name is not None or self._is_dead(state, now):
            self._fail_dead(watch, state)
        elif now - state.beat_at >= _SUSPECT_SECONDS:
            self._sample_cpu(state, now)
            if state.cpu_since is not None and min(now - state.beat_at, now - state.cpu_since) >= self._stopped_after:
                silent = now - state.beat_at
                detail = f"no beat for {silent:.0f} s and no CPU time gained for {now - state.cpu_since:.0f} s"
                self._fail(watch, state, "stopped", detail)

    def _is_dead(self, state: _RankState, now: float) -> bool:
        if state.facts.host == self._host:
            return not is_running(state.facts.pid)
        if state.lost_at is None:  # a node that lost its power closes no socket
            return now - state.beat_at >= _SUSPECT_SECONDS and self._is_node_gone(state.facts.node_id, now)
        return is_actor_dead(state.facts.actor_id) or not is_node_alive(state.facts.node_id)

    def _is_node_gone(self, node_id: str, now: float) -> bool:
        if now - self._nodes_at >= _NODES_SECONDS:
            self._nodes_at, self._nodes = now, alive_nodes()
        return bool(self._nodes) and node_id not in self._nodes  # without this process's own node nothing was learnt

    def _sample_cpu(self, state: _RankState, now: float) -> None:
        cpu = cpu_seconds(state.facts.pid) if state.facts.host == self._host else self._probe(state)
        if cpu is None:
            return
        if state.cpu is None or cpu - state.cpu > _CPU_STEP_SECONDS:
            state.cpu, state.cpu_since = cpu, now

    def _probe(self, state: _RankState) -> float | None:
        """CPU time on another node, asked by a task there; None until it has answered."""
        node, pid = state.facts.node_id, state.facts.pid
        asked = self._probes.pop(node, None)
        answer: float | None = None
        if asked is not None:
            done, _ = ray.wait([asked], timeout=0)
            if not done:
                self._probes[node] = asked
                return None
            try:
                times: dict[int, float | None] = ray.get(asked)
                answer = times.get(pid)
            except RayError as error:
                _log.warning("node %s could not be asked about pid %d: %s", node, pid, error)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(cpu_seconds_of)
        self._probes[node] = task.options(scheduling_strategy=where).remote([pid])
        return answer

    def _fail_dead(self, watch: _Watch, state: _RankState) -> None:
        local = state.facts.host == self._host
        is_node_lost = not is_running(state.facts.raylet_pid) if local else not is_node_alive(state.facts.node_id)
        tail = self._best_tail(state)
        kind, detail = death_kind(
            "its node is gone" if is_node_lost else "",
            state.exit_code,
            state.signal_name,
            tail,
            # A killed process beats no more, but its last beat may have been read after its end.
            is_oom=local and self._memory_kills() > state.memory_kills[0],
        )
        self._fail(watch, state, kind, detail)

    def _best_tail(self, state: _RankState) -> list[str]:
        # The file is newer than the last beat where this machine can read it.
        from_file = read_tail(Path(state.facts.log_file)) if state.facts.host == self._host else []
        return from_file or state.tail

    def _fail(self, watch: _Watch, state: _RankState, kind: str, detail: str) -> None:
        state.is_over = True
        role, _, method = (state.running or "").partition(".")
        more: dict[str, Any] = {"method": method or None, "raised_at": time.monotonic()}
        if role:
            more["role"] = role
        failure = watch.facts.failure(state.facts.rank, kind, detail, **more).with_tail(self._best_tail(state))
        self.keep(failure)
