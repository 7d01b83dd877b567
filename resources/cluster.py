"""The run's hold on Ray: starts or joins a cluster, and on leaving by any door leaves nothing of the run behind."""

import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import ray

from configs.environment import DEFAULTS, apply_defaults
from configs.pools import PoolConfig
from resources.cleanup import CONTROLLER_KEY, clean_run, controller_identity, is_run_alive
from resources.inventory import settled_nodes
from resources.node_resources import NodeResources
from resources.pool_manager import DEADLINE_SECONDS, PoolManager
from resources.ray_state import hush_zero_copy_warnings, local_ray_pids, reread_settings, set_up_local_ray
from resources.reaper import Reaper
from resources.registry import drop_card, read_card, write_card
from resources.signals import ENDING, is_ignored
from resources.supervision import STOPPED_SECONDS, Supervisor
from resources.worker_spec import Endable

CONNECT_SECONDS = 5.0
_log = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """Ray cannot be started or reached, or the run's name is taken."""


class Cluster:
    """A run on a Ray cluster, as a context manager.

    >>> with Cluster("my-run", num_cpus=4) as cluster:                                      # doctest: +SKIP
    ...     cluster.pools.reserve({"main": PoolConfig(bundles=2)})
    ...     group = start_group(cluster, cluster.pools["main"], WorkerSpec(role="actor", worker=MyWorker))
    """

    def __init__(
        self,
        run_id: str,
        *,
        address: str | None = None,
        run_dir: Path | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        object_store_bytes: int | None = None,
        worker_env: Mapping[str, str] | None = None,
        stopped_after_seconds: float = STOPPED_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """
        Args:
            run_id: namespace of everything this run makes; one live run per id on a cluster.
            address: `host:port` of a cluster to join; "local" starts one; None takes the connection this process has,
                or starts one.
            run_dir: where `logs/{role}-{rank}.log` go.
            num_cpus, num_gpus, resources, object_store_bytes: only for a cluster started here.
            worker_env: added to every worker's environment.
            stopped_after_seconds: a worker without a beat and without CPU time gained for so long counts as stopped.
            connect_seconds: how long `address` has to accept a connection.
        """
        if not run_id or "/" in run_id:
            raise ClusterError(f"run id is {run_id!r}; it must be a name without slashes")
        self.run_id = run_id
        self.run_dir = run_dir if run_dir is not None else Path(tempfile.gettempdir()) / "callsheet" / run_id
        self.pools = PoolManager(run_id)
        self._supervisor: Supervisor | None = None
        self.worker_env: dict[str, str] = {}
        self._address = address
        self._local = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources or {}),
            "object_store_memory": object_store_bytes,
        }
        self._user_env = dict(worker_env or {})
        self._stopped_after = stopped_after_seconds
        self._connect_seconds = connect_seconds
        self._adopted: list[Endable] = []
        self._reaper: Reaper | None = None
        self._owns_ray = False
        self._is_local = False
        self._handlers: dict[int, Any] = {}

    @property
    def supervisor(self) -> Supervisor:
        """Who watches over this run's workers. Raises ClusterError outside the `with` block."""
        if self._supervisor is None:
            raise ClusterError(f"run {self.run_id} is not on a cluster; use it inside its `with` block")
        return self._supervisor

    @property
    def log_dir(self) -> Path:
        """Folder of the workers' own log files."""
        return self.run_dir / "logs"

    def __enter__(self) -> "Cluster":
        apply_defaults()
        is_up = False
        try:
            self._handle_signals()
            self._connect()
            hush_zero_copy_warnings()
            self._handle_signals()  # Ray has put its own handler in between.
            self._claim_name()
            identity = controller_identity(os.getpid())
            self._reaper = Reaper(CONTROLLER_KEY, identity, local_ray_pids() if self._is_local else [])
            self._supervisor = Supervisor(ray.util.get_node_ip_address(), self._stopped_after)
            self.worker_env = {
                **{key: os.environ[key] for key in DEFAULTS if key in os.environ},
                CONTROLLER_KEY: identity,
                **self._user_env,
            }
            is_up = True
        finally:
            if not is_up:
                self._leave()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def inventory(self) -> list[NodeResources]:
        """The live nodes in order, what is free on each, and who holds the rest."""
        return settled_nodes()

    def reserve(
        self,
        configs: Mapping[str, PoolConfig],
        deadline_seconds: float = DEADLINE_SECONDS,
        pins: Mapping[str, Sequence[str]] | None = None,
    ) -> PoolManager:
        """Reserve pools; see PoolManager.reserve."""
        self.pools.reserve(configs, deadline_seconds, pins)
        return self.pools

    def adopt(self, processes: Endable) -> None:
        """End these processes when the run ends."""
        self._adopted.append(processes)

    def close(self) -> None:
        """End every process, give back every pool, forget the run. A second Ctrl-C does not interrupt it."""
        self._hold_signals()
        try:
            for processes in self._adopted:
                if not processes.is_detached:
                    processes.stop()
            self.pools.release()
            drop_card("run", self.run_id, "controller")
        finally:
            self._leave()

    # --- start ----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if self._address not in (None, "local", here):
                raise ClusterError(
                    f"this process is connected to Ray at {here} already; it cannot join {self._address} too"
                )
            return
        options: dict[str, Any] = {"namespace": self.run_id, "log_to_driver": False, "logging_level": logging.WARNING}
        if self._address in (None, "local"):
            set_up_local_ray()
            options |= {"address": "local", "include_dashboard": False}
            options |= given(self._local)
        else:
            check_listening(str(self._address), self._connect_seconds)
            options["address"] = self._address
            reread_settings()
        try:
            ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            way_out = ""
            if isinstance(error, OSError) and self._address in (None, "local"):
                folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
                way_out = f"; it keeps its sockets in {folder}: set RAY_TMPDIR to a writable folder with a short name"
            raise ClusterError(f"Ray at {self._address or 'local'} cannot be used: {error}{way_out}") from error
        self._owns_ray = True
        self._is_local = self._address in (None, "local")

    def _claim_name(self) -> None:
        card = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "job": ray.get_runtime_context().get_job_id(),
            "started": time.time(),
            "run_dir": str(self.run_dir.absolute()),
        }
        for _ in range(2):
            if write_card("run", self.run_id, "controller", json.dumps(card).encode(), is_new=True):
                return
            found = read_card("run", self.run_id, "controller")
            if found is not None and is_run_alive(json.loads(found)):
                other = json.loads(found)
                raise ClusterError(
                    f"a run named {self.run_id!r} is on this cluster already (pid {other['pid']} on {other['host']}); "
                    f"choose another name, or end it first (callsheet clean --run {self.run_id})"
                )
            clean_run(self.run_id)
        raise ClusterError(
            f"the run name {self.run_id!r} could not be claimed; another process claims it at the same time"
        )

    # --- end ------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False
        if self._reaper is not None:
            self._reaper.dismiss()
            self._reaper = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if not is_ignored(number):
                    self._handlers.setdefault(number, signal.signal(number, _terminate))

    def _hold_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if is_ignored(number):
                    continue
                previous = signal.signal(number, _wait_for_cleanup)
                self._handlers.setdefault(number, previous)


def given(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a local cluster's sizes that were given: 0 is one of them, and Ray finds the others by itself.

    >>> given({"num_cpus": None, "num_gpus": 0, "resources": {}})
    {'num_gpus': 0}
    """
    return {name: size for name, size in sizes.items() if size not in (None, {})}


def check_listening(address: str, seconds: float = CONNECT_SECONDS) -> None:
    """Raise ClusterError within `seconds` when nobody listens at host:port; Ray itself tries much longer."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"address is {address!r}; write host:port, for example 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except OSError as error:
        raise ClusterError(
            f"nobody listens at {address} ({error}); start Ray there (ray start --head --port {port}) "
            "or leave the address out to start a local one"
        ) from error


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_for_cleanup(number: int, frame: FrameType | None) -> None:
    _log.warning("%s while cleaning up; it takes a few seconds", signal.Signals(number).name)
