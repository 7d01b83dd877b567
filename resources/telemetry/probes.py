"""Small probes a worker or a host carries: system load, grader latency, micro-batch fill.

torch is never imported here: its figures are read only in a process that has it already.
"""

import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from resources.telemetry.rollout_gauge import quantile

SLOW_CALL_RATIO = 5.0
"""A grader call longer than this many medians is a slow one."""
SLOW_CALL_FLOOR_SECONDS = 0.1
"""Below this nothing counts as slow: it is jitter of a busy machine."""
SLOW_CALL_SHARE = 0.1
"""Nor does a call that took less than this share of the longest one: beside that it does not matter."""


class SystemSampler:
    """Load of the node and of this process, when asked; a sample costs well under a millisecond."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self.own_cpu_seconds = 0.0
        psutil.cpu_percent(interval=None)  # the first reading is meaningless; later ones are since the last

    def sample(self, object_store_bytes: int | None = None) -> dict[str, Any]:
        """Facts of the system section of `facts.py`; accelerator figures only where there is one."""
        cpu = time.thread_time()
        facts: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(interval=None),
            "memory_bytes": psutil.virtual_memory().used,
            "resident_bytes": self._process.memory_info().rss,
        }
        if object_store_bytes is not None:
            facts["object_store_bytes"] = object_store_bytes
        facts.update(_accelerator_facts())
        self.own_cpu_seconds += time.thread_time() - cpu
        return facts


def _accelerator_facts() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    facts: dict[str, Any] = {"peak_memory_bytes": torch.cuda.max_memory_allocated()}
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return facts
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            "GPU-" + str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        )
        facts["gpu_percent"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        facts["gpu_memory_bytes"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except pynvml.NVMLError:  # a container without the driver's library: the figures are left out
        return facts
    return facts


def peak_memory_bytes() -> int:
    """Highest accelerator memory of this process, or its highest resident memory on a CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MicroBatchFill:
    """Share of a role's padded micro-batches that is real tokens.

    >>> fill = MicroBatchFill(); fill.add(real_tokens=6, padded_tokens=8); fill.add(real_tokens=0, padded_tokens=4)
    >>> fill.facts()
    {'tokens': 6, 'micro_batches': 2, 'micro_batch_fill': 0.5}
    """

    def __init__(self) -> None:
        self._real = 0
        self._padded = 0
        self._count = 0

    def add(self, *, real_tokens: int, padded_tokens: int) -> None:
        """One micro-batch of `padded_tokens` = rows x padded length; a dummy one has 0 real tokens."""
        if not 0 <= real_tokens <= padded_tokens:
            raise ValueError(
                f"real_tokens is {real_tokens} of {padded_tokens} padded tokens; it lies between 0 and those"
            )
        self._real += real_tokens
        self._padded += padded_tokens
        self._count += 1

    def facts(self) -> dict[str, Any]:
        fill = {"micro_batch_fill": self._real / self._padded} if self._padded else {}
        return {"tokens": self._real, "micro_batches": self._count, **fill}


class GraderLatency:
    """Latencies of one grader in one iteration."""

    def __init__(self, name: str, kind: str, workers: int = 1) -> None:
        self.name = name
        self.kind = kind
        """rule, python, model, judge, http or sandbox, as in the config."""
        self.workers = workers
        """Calls that can be under way at once."""
        self._seconds: list[float] = []
        self._timeouts = 0

    def add(self, seconds: float, *, timed_out: bool = False) -> None:
        self._seconds.append(seconds)
        self._timeouts += timed_out

    def facts(self) -> dict[str, Any]:
        """One entry of the `graders` fact.

        >>> latency = GraderLatency("math", "rule")
        >>> for seconds in (0.01, 0.01, 0.01, 4.0):
        ...     latency.add(seconds)
        >>> latency.facts()["slow_calls"], latency.facts()["p50_seconds"]
        (1, 0.01)
        """
        return {
            "name": self.name,
            "kind": self.kind,
            "workers": self.workers,
            "timeouts": self._timeouts,
            **_latencies(self._seconds),
        }


def _latencies(seconds: Sequence[float]) -> dict[str, Any]:
    if not seconds:
        return {"calls": 0}
    ordered = sorted(seconds)
    median = quantile(ordered, 0.5)
    slow = max(SLOW_CALL_RATIO * median, SLOW_CALL_FLOOR_SECONDS, SLOW_CALL_SHARE * ordered[-1])
    return {
        "calls": len(ordered),
        "p50_seconds": median,
        "p95_seconds": quantile(ordered, 0.95),
        "max_seconds": ordered[-1],
        "total_seconds": sum(ordered),
        "slow_calls": sum(value > slow for value in ordered),
    }
