"""Examples in docstrings and on the page are executed."""

import doctest
from pathlib import Path

import pytest

from resources import prompts, weight_sender
from resources.engines import base, huggingface

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", [base, huggingface, prompts, weight_sender], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_hold(module):
    found = doctest.testmod(module)
    assert (found.attempted > 0, found.failed) == (True, 0)


def test_the_examples_of_the_page_hold():
    assert doctest.testfile(str(ROOT / "docs" / "rollout.md"), module_relative=False).failed == 0
