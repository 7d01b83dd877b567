"""The Ray actor in which the workers of one rank live.

It is generic: it learns its rank, sets the environment, and only then imports and constructs the worker classes, so a
constructor can rely on RANK and MASTER_ADDR. Calls name a slot (role and method) in a few bytes, or are short ones.
"""

import asyncio
import concurrent.futures
import inspect
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from resources.dispatch import MethodInfo
from resources.failures import RankError
from resources.frozen_heap import freeze_heap
from resources.heartbeat import Heartbeat, redirect_output
from resources.import_paths import import_class
from resources.process_facts import host_identity
from resources.ray_state import enable_zero_copy_tensors
from resources.rendezvous import host_store
from resources.short_calls import SHORT_CALLS, short_keys, short_name
from resources.splitting import is_array, is_stored_rows, is_tensor, is_tensordict

HEADER = struct.Struct("<diB")
"""Every call but a short one begins with: time of submission (controller's clock), incarnation, flags."""
ANSWERS = 1
"""Flag: this rank answers with data."""
PRIVATE = 2
"""Flag: no argument came by reference, so nobody else reads the memory it lies in."""
EMPTY: Mapping[str, Any] = MappingProxyType({})
TIMES = struct.Struct("<dd")
"""The whole answer of a call that returned None: start and end, on the controller's clock."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a process is told before anything else."""

    run_id: str
    group: str
    pool: str
    incarnation: int
    rank: int
    supervisor: tuple[str, int]
    token: str
    log_file: str
    is_detached: bool


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """One role to construct: its class (or import path), arguments, and marked methods."""

    role: str
    worker: type | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    methods: tuple[MethodInfo, ...]


class WorkerProcess:
    """Runs the calls of one rank, one after another, on the main thread."""

    answers_are_copied = True
    """Ray puts an answer into the store on this thread, before the next call begins: it may be the live memory."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._slots: dict[bytes, _Slot] = {}
        self._short: list[_Slot] = []
        self._siblings: dict[str, Any] = {}
        self._store: Any = None
        self._heartbeat: Heartbeat | None = None
        self._offset = 0.0
        self._is_zero_copy = False

    def boot(self) -> dict[str, Any]:
        """Open the log, begin to beat, and say where this process is."""
        seat = self._seat
        redirect_output(Path(seat.log_file))
        os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
        hello = {
            "token": seat.token,
            "group": seat.group,
            "incarnation": seat.incarnation,
            "rank": seat.rank,
            "pid": os.getpid(),
        }
        self._heartbeat = Heartbeat(seat.supervisor, hello, Path(seat.log_file), seat.is_detached)
        self._heartbeat.start()
        self._offset = self._heartbeat.clock_offset
        context = ray.get_runtime_context()
        accelerators = context.get_accelerator_ids()
        return {
            "actor_id": context.get_actor_id(),
            "node_id": context.get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "raylet_pid": os.getppid(),
            "host": host_identity(),
            "log_file": seat.log_file,
            "devices": [f"{kind}:{device}" for kind, devices in accelerators.items() for device in devices],
        }

    def open_store(self, node_ip: str, world_size: int, timeout_seconds: float) -> tuple[str, int]:
        """Rank 0: host the rendezvous store of this incarnation."""
        self._store, address = host_store(node_ip, world_size, timeout_seconds)
        return address

    def set_environment(self, env: Mapping[str, str]) -> None:
        """The rank's environment; before any constructor."""
        os.environ.update(env)

    def construct(self, env: Mapping[str, str], setups: tuple[RoleSetup, ...]) -> dict[str, float]:
        """Set the rank's environment, then import and construct every role. Returns when it began and ended."""
        began = time.monotonic()
        self.set_environment(env)
        for setup in setups:
            self._note(f"{setup.role}.__init__")
            try:
                worker_class = import_class(setup.worker) if isinstance(setup.worker, str) else setup.worker
                worker = worker_class(*setup.args, **setup.kwargs)
            except BaseException as error:  # noqa: BLE001 - the wire: whatever a constructor raises must reach the caller as text
                raise as_rank_error(error, self._now()) from None
            worker.siblings = self._siblings
            worker.answers_are_copied = self.answers_are_copied
            self._siblings[setup.role] = worker
            for method in setup.methods:
                key = f"{setup.role}.{method.name}".encode()
                self._slots[key] = _Slot(
                    f"{setup.role}.{method.name}", inspect.getattr_static(worker_class, method.name), worker, method
                )
        pairs = [(setup.role, method) for setup in setups for method in setup.methods]
        self._short = [self._slots[key.encode()] for key in short_keys(pairs)]
        freeze_heap()
        self._note(None)
        return {"began": began + self._offset, "ended": self._now()}

    def call(self, header: bytes, *args: Any, **kwargs: Any) -> Any:
        """Run one marked method. None -> packed times; otherwise (start, end, value), or two objects for bulk."""
        slot, flags, submitted = self._open(header)
        return self._run(slot, flags, submitted, args, kwargs)

    def _run(
        self, slot: "_Slot", flags: int, submitted: float, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = EMPTY
    ) -> Any:
        start = self._now()
        self._note(slot.name)
        try:
            return self._pack(slot, flags, submitted, start, slot.run(flags, args, kwargs))
        except BaseException as error:  # noqa: BLE001 - the wire: whatever a worker raises must reach the caller as text
            raise as_rank_error(error, self._now()) from None
        finally:
            self._note(None)

    def _open(self, header: bytes) -> tuple["_Slot", int, float]:
        submitted, incarnation, flags = HEADER.unpack_from(header)
        if incarnation != self._seat.incarnation:
            raise RankError(
                "StaleGroup",
                f"call of incarnation {incarnation}; this process is of {self._seat.incarnation}",
                "",
                self._now(),
            )
        return self._slots[header[HEADER.size :]], flags, submitted

    def _pack(self, slot: "_Slot", flags: int, submitted: float, start: float, value: Any) -> Any:
        if not self._is_zero_copy and "torch" in sys.modules:
            enable_zero_copy_tensors()
            self._is_zero_copy = True
        if not slot.method.marking.bulk:
            if value is None or not flags & ANSWERS:
                return TIMES.pack(start, self._now())
            return start, self._now(), value
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], dict)):
            raise TypeError(
                f"{slot.name} is marked bulk and returned a {type(value).__name__}; return (status dict, data)"
            )
        status, data = value
        span = {
            "rank": self._seat.rank,
            "queue_seconds": max(0.0, start - submitted),
            "start": start,
            "end": self._now(),
        }
        reply = {**status, "span": {**span, "execute_seconds": span["end"] - start}}
        if is_tensordict(data) and "row_ids" in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            # What the caller needs to know of data that it never fetches.
            reply["shard"] = {"row_ids": data["row_ids"].tolist(), "columns": sorted(data.keys())}
        return reply, data if flags & ANSWERS else None

    def _note(self, running: str | None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.running = running

    def _now(self) -> float:
        return time.monotonic() + self._offset


def _short_call(number: int) -> Callable[[WorkerProcess], Any]:
    def run(self: WorkerProcess) -> Any:
        return self._run(self._short[number], ANSWERS, 0.0)

    run.__name__ = short_name(number)
    return run


for _number in range(SHORT_CALLS):  # Ray knows an actor's methods from its class
    setattr(WorkerProcess, short_name(_number), _short_call(_number))


class AsyncWorkerProcess(WorkerProcess):
    """For workers with async methods: those overlap, the others run one after another on a thread of their own."""

    answers_are_copied = False

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._serial = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")

    async def construct(self, env: Mapping[str, str], setups: tuple[RoleSetup, ...]) -> dict[str, float]:  # type: ignore[override]
        """As in WorkerProcess, on the thread that will run the plain methods."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._serial, super().construct, env, setups)

    async def call(self, header: bytes, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in WorkerProcess."""
        slot, flags, submitted = self._open(header)
        if not slot.method.is_async:
            run = super().call
            return await asyncio.get_running_loop().run_in_executor(self._serial, lambda: run(header, *args, **kwargs))
        start = self._now()
        try:
            return self._pack(slot, flags, submitted, start, await slot.run(flags, args, kwargs))
        except BaseException as error:  # noqa: BLE001 - the wire
            raise as_rank_error(error, self._now()) from None


class _Slot:
    """One marked method of one worker, and how its arguments are received."""

    def __init__(self, name: str, function: Callable[..., Any], worker: Any, method: MethodInfo) -> None:
        self.name = name
        self.function = function
        self.worker = worker
        self.method = method
        self.is_read_only = method.marking.read_only

    def run(self, flags: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the method on arguments it may write into."""
        if not args and not kwargs:
            return self.function(self.worker)
        is_private = bool(flags & PRIVATE)
        mine = [self._own(value, is_private) for value in args]
        return self.function(self.worker, *mine, **{name: self._own(v, is_private) for name, v in kwargs.items()})

    def _own(self, value: Any, is_private: bool) -> Any:
        """Rows become a TensorDict; arrays become the method's own, since shared memory is other readers' data too."""
        if is_stored_rows(value):
            return value.load()
        if self.is_read_only:
            return value
        if is_tensor(value) or is_tensordict(value):
            return value if is_private else value.clone()
        if is_array(value):
            return value if value.flags.writeable else value.copy()
        if type(value) is dict:
            return {name: self._own(column, is_private) for name, column in value.items()}
        return value


def as_rank_error(error: BaseException, now: float) -> RankError:
    """The exception as text, since its class may not exist, or not unpickle, where it is read."""
    if isinstance(error, RankError):
        return error
    # The first frame is this file's call of the method.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    sys.stderr.write(trace)
    return RankError(type(error).__qualname__, str(error), trace, now)
