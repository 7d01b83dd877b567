"""A reward model is fitted to pairs; rows that are none are told before anything is started."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from configs.problems import ConfigError
from resources.preference_pairs import check_pairs


def refused(source: str) -> list[str]:
    try:
        check_pairs(load_config("quickstart", [f"data.sources=[{{name: s, {source}}}]"]))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def table(folder: Path, *rows: dict) -> str:
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"prompt": "p", **row}) + "\n" for row in rows))
    return f"kind: json, path: {folder / 'pairs.jsonl'}, answer_column: chosen"


def test_rows_with_both_texts_are_pairs(tmp_path: Path):
    assert refused(table(tmp_path, {"chosen": "a", "rejected": "b"}, {"chosen": "c", "rejected": "d"})) == []


@pytest.mark.parametrize("rejected", [{}, {"rejected": ""}, {"rejected": None}, {"rejected": 3}])
def test_the_first_row_that_is_no_pair_is_told_with_its_number_and_column(tmp_path: Path, rejected: dict):
    [said] = refused(table(tmp_path, {"chosen": "a", "rejected": "b"}, {"chosen": "c", **rejected}))
    assert said.startswith("data.sources.0: row 1 of source 's' is no preference pair: the preferred response is 'c'")
    assert "(column 'rejected'); both are texts" in said


def test_generated_prompts_are_no_pairs():
    [said] = refused("kind: sorting")
    assert "row 0 of source 's' is no preference pair" in said
