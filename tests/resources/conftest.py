"""One local Ray per test module, with logical CPUs, GPUs and NPUs that do not exist."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from resources.cluster import Cluster
from resources.ray_state import set_up_local_ray
from tests.scripted_service import serve

__all__ = ["cluster", "local_ray", "open_run", "serve"]

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this module's own."""
    if ray.is_initialized():
        ray.shutdown()
    set_up_local_ray()
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=8,
        resources={"NPU": 4},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        namespace="tests",
    )
    yield
    ray.shutdown()


@pytest.fixture
def open_run(local_ray: None, tmp_path: Path) -> Callable[[], Cluster]:
    """Gives runs with names of their own; use each in a `with`."""
    return lambda: Cluster(f"run-{next(_NUMBERS)}", run_dir=tmp_path)


@pytest.fixture
def cluster(open_run: Callable[[], Cluster]) -> Iterator[Cluster]:
    """A run on the module's Ray."""
    with open_run() as run:
        yield run
