"""What travels between the controller and a task host: a call, its outcome, and their bytes, which are counted.

Neither the flow, nor its parameters, nor any setting is shipped: a host has its settings from its environment.
"""

import importlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import cloudpickle
import ray
from prefect import Task

SHIPPED_BY_NAME = ("tasks", "resources", "configs", "benchmarks")
"""Packages that every node has; a task defined elsewhere (a test, a notebook) travels by value."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """Stands in the parameters for the outcome of an earlier task: its place among the call's upstream outcomes."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRunFacts:
    """What a task's row needs to know of its flow run."""

    id: UUID
    flow_id: UUID
    name: str
    run_count: int
    tags: tuple[str, ...] = ()
    deployment_id: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCall:
    """One task to run in a host."""

    task: "str | Task[Any, Any]"
    """`module:name` of a task every node has, or the task itself."""
    task_run_id: UUID
    flow_run: FlowRunFacts | None
    parameters: Mapping[str, Any]
    wait_for: tuple[Upstream, ...] = ()


class _Pickler(cloudpickle.Pickler):
    """Refuses ObjectRefs: plain pickling does not keep their data alive, so the receiver would find nothing."""

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, ray.ObjectRef):
            raise TypeError(f"{obj} is an ObjectRef; between tasks pass the BatchHandle, the table keeps the reference")


def encode(value: Any) -> bytes:
    """Pickle `value`. Raises TypeError when an ObjectRef is anywhere inside."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """Unpickle what `encode` made in another process of this run."""
    return cloudpickle.loads(data)


def reference_to(task: "Task[Any, Any]") -> "str | Task[Any, Any]":
    """`module:name` where every node can import the task, else the task itself."""
    module, name = task.fn.__module__, task.fn.__qualname__
    if module.split(".")[0] not in SHIPPED_BY_NAME:
        return task
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is task else task


def resolve_task(reference: "str | Task[Any, Any]") -> "Task[Any, Any]":
    """The task a reference names. Raises ImportError when this node's code lacks it."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, Task):
        raise ImportError(f"{reference} is no task on this node; its code differs from the controller's")
    return found
