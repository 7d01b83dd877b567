"""Growth of an iteration: which points a plot has."""

import json
from pathlib import Path

from benchmarks import growth


def test_a_run_of_some_counts_replaces_those_and_leaves_the_others(tmp_path: Path):
    growth.draw("ranks", [(2, 0.2), (8, 0.3)], tmp_path)
    growth.draw("ranks", [(8, 0.25), (64, 0.4)], tmp_path)
    assert json.loads((tmp_path / "figures.json").read_text()) == {"ranks": [[2, 0.2], [8, 0.25], [64, 0.4]]}


def test_other_parts_are_of_their_last_run(tmp_path: Path):
    parts = ("prompts", "length", "group")
    growth.draw("work", {name: [(1, 1.0), (2, 2.0)] for name in parts}, tmp_path)
    growth.draw("work", {name: [(2, 3.0), (4, 4.0)] for name in parts}, tmp_path)
    assert json.loads((tmp_path / "figures.json").read_text())["work"]["prompts"] == [[2, 3.0], [4, 4.0]]
