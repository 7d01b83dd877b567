"""Shared by all tests: the environment of every process, and fast tests before slow ones."""

import os
import socket
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from configs.environment import apply_defaults

# Shapes of public tensor arguments are checked under test; before anything imports the functions. An int is a float
# here, as it is to pyright.
install_import_hook("tasks.algorithms", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
apply_defaults()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; the order within each half stays."""
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is not None, item.get_closest_marker("chaos") is not None)
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder for runs, away from the user's."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
