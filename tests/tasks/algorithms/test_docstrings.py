"""The examples in docstrings and in docs/algorithms.md are executed."""

import doctest
import importlib
from pathlib import Path

import pytest

from tasks.algorithms.policy_losses import POLICY_LOSSES

ROOT = Path(__file__).parents[3]
MODULES = [
    f"tasks.{folder}.{path.stem}"
    for folder in ("algorithms", "rewards")
    for path in sorted((ROOT / "tasks" / folder).glob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")}).failed == 0


def test_the_numbers_of_the_page_are_right() -> None:
    assert doctest.testfile(str(ROOT / "docs" / "algorithms.md"), module_relative=False).failed == 0


def test_every_algorithm_is_on_the_page() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert [name for name in POLICY_LOSSES if f"`{name}`" not in page] == []
