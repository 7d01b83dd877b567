"""The seed of the chaos tests, the part of them that a commit's hash chooses, and undisturbed runs to compare with."""

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.ppo import ppo
from tests.harness import prefect_session

__all__ = ["prefect_session"]

BEGUN = time.monotonic()

PART_SECONDS = 480.0
PART_TESTS = {"test_processes": 180.0, "test_controller": 180.0, "test_disk_and_server": 90.0}
"""Files of which a part takes one test each, and what such a test takes on two cores that others use too, in seconds.

A test for which no time is left is skipped with that reason, so that a slow machine does less and not longer.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, default=None, help="seed of the faults; the commit's hash when left out")
    parser.addoption("--chaos-part", action="store_true", help="only a part of the matrix, chosen by the seed")


def seed_of(config: pytest.Config) -> int:
    given = config.getoption("--chaos-seed", default=None)
    if given is not None:
        return int(given)
    root = Path(__file__).parents[2]
    found = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return int(found.stdout.strip() or "0", 16)


def pytest_report_header(config: pytest.Config) -> str:
    return f"chaos seed: {seed_of(config)} (make chaos SEED={seed_of(config)})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.chaos)
        item.add_marker(pytest.mark.timeout(1800))
    if not config.getoption("--chaos-part", default=False):
        return
    chosen = random.Random(seed_of(config))
    groups = [[item for item in here if item.path.stem == file and "vllm" not in item.name] for file in PART_TESTS]
    stay = [chosen.choice(group) for group in groups if group]
    chosen.shuffle(stay)  # so that each kind comes to its turn on a slow machine
    config.hook.pytest_deselected(items=[item for item in items if item not in stay])
    items[:] = stay


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--chaos-part", default=False):
        left = PART_SECONDS - (time.monotonic() - BEGUN)
        if left < PART_TESTS.get(item.path.stem, 0.0):
            pytest.skip(f"{left:.0f} s are left of the {PART_SECONDS:.0f} s of a part, too few for this test")


@pytest.fixture(scope="session")
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Chooses the faults."""
    return seed_of(request.config)


@pytest.fixture(scope="session")
def is_part(request: pytest.FixtureRequest) -> bool:
    """Whether a part of the matrix runs: a test then takes fewer faults."""
    return bool(request.config.getoption("--chaos-part", default=False))


@pytest.fixture(scope="session")
def undisturbed(prefect_session: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Path]:
    """The folder of the same run without a fault; made once for each config."""
    made: dict[str, Path] = {}

    def folder_of(config: RunConfig) -> Path:
        plain = config.model_copy(update={"name": "undisturbed", "run_dir": ""}).model_dump_json()
        if plain not in made:
            runs = tmp_path_factory.mktemp("undisturbed")
            ppo(config.model_copy(update={"name": f"undisturbed-{len(made)}", "run_dir": str(runs)}))
            made[plain] = runs / f"undisturbed-{len(made)}"
        return made[plain]

    return folder_of
