"""The facts of a Ray cluster that Ray's public API tells only through its dashboard, which a run does without.

All reading of `ray._private` is here, so that a new version of Ray is checked in one place.
"""

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from ray._private import state  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from ray._private import worker as worker_module  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from ray._private.tensor_serialization_utils import ZeroCopyTensorsWarning, zero_copy_tensors_reducer
from ray._private.worker import global_worker
from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]
from ray.actor import ActorHandle
from ray.util import list_named_actors

LOCAL_SETTINGS = {
    "RAY_process_group_cleanup_enabled": "true",  # a dead worker's children go with it
    "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the machine starve the run that Ray is here for
    "RAY_enable_worker_prestart": "false",  # every process of ours has an environment of its own; idle ones,
    "RAY_prestart_worker_first_driver": "false",  # each of which imports torch, would wait for nothing
}
"""Environment of a Ray that is started here; Ray reads it when it starts."""


def set_up_local_ray() -> None:
    """Settle the environment of a Ray that this process is about to start; what is set already stays."""
    for key, value in LOCAL_SETTINGS.items():
        os.environ.setdefault(key, value)
    reread_settings()


def free_per_node() -> Mapping[str, Mapping[str, float]]:
    """Node id -> what is available there."""
    return state.available_resources_per_node()


def all_nodes() -> list[Mapping[str, Any]]:
    """Every node the cluster has had: NodeID, Alive, NodeManagerAddress, Resources, Labels."""
    return state.nodes()


def alive_nodes() -> frozenset[str]:
    """Ids of the nodes that the cluster still counts on."""
    return frozenset(node["NodeID"] for node in all_nodes() if node["Alive"])


def is_node_alive(node_id: str) -> bool:
    """Whether the cluster still counts on the node."""
    return node_id in alive_nodes()


def is_job_alive(job_id: str) -> bool:
    """Whether the driver of a job still runs."""
    return any(job["JobID"] == job_id and not job["IsDead"] for job in state.jobs())


def is_actor_dead(actor_id: str) -> bool:
    """Whether a Ray actor has ended or was never known."""
    return state.actors(actor_id).get("State", "DEAD") == "DEAD"


def actor_id_of(actor: ActorHandle) -> str:
    """The id of a Ray actor, as hex."""
    return actor._actor_id.hex()


def named_actors() -> list[tuple[str, str]]:
    """(namespace, name) of every named Ray actor."""
    return [(actor["namespace"], actor["name"]) for actor in list_named_actors(all_namespaces=True)]  # pyright: ignore


def reread_settings() -> None:
    """Let Ray read its environment again; it did when it was imported, which may have been before ours was set."""
    Config.initialize("")


def enable_zero_copy_tensors() -> None:
    """What RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 does when Ray starts, for a process that has imported torch since.

    Set at the start, the flag makes Ray import torch in every process, whether or not it ever sees a tensor.
    """
    hush_zero_copy_warnings()
    context = global_worker.get_serialization_context()
    context._register_cloudpickle_reducer(sys.modules["torch"].Tensor, zero_copy_tensors_reducer)


def hush_zero_copy_warnings() -> None:
    """That tensors are shared and not to be written into is this layer's own contract; once is more than enough."""
    warnings.filterwarnings("ignore", category=ZeroCopyTensorsWarning)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)


def local_ray_pids() -> list[int]:
    """The processes that this process started when it started a local Ray."""
    node: Any = worker_module._global_node
    return [] if node is None else [info.process.pid for group in node.all_processes.values() for info in group]
