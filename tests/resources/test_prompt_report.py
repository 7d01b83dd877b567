"""What `callsheet data` finds in a data set."""

import json
from pathlib import Path

import pytest

from configs.data import DataConfig, SourceConfig, ValidationConfig
from resources.models.character_tokenizer import build_character_tokenizer
from resources.prompt_report import PromptReport, report_prompts

TOKENIZER = build_character_tokenizer()


def source(folder: Path, rows: list[tuple[str, str]], name: str = "file", **changes) -> SourceConfig:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows))
    return SourceConfig(name=name, kind="json", path=str(path), **changes)


def report(
    *sources: SourceConfig, held_out: tuple[SourceConfig, ...] = (), num_prompts: int = 2, **changes
) -> PromptReport:
    data = DataConfig(sources=sources, **{"prompts_per_iteration": 2, **changes})
    validation = ValidationConfig(sources=held_out, num_prompts=num_prompts)
    return report_prompts(data, validation, TOKENIZER, group_size=4)


def test_lengths_are_those_before_any_limit(tmp_path: Path):
    rows = [("12", "1"), ("123", "12"), ("1234", "123"), ("123456789", "1")]
    [found] = report(source(tmp_path, rows), max_prompt_length=4).sources
    assert found.prompt_tokens == {"0%": 2, "50%": 4, "95%": 9, "100%": 9}
    assert found.answer_tokens["100%"] == 3
    assert (found.overlong, found.overlong_rows) == (1, [3])


def test_what_the_filter_takes_is_missing_from_the_epoch(tmp_path: Path):
    found = report(source(tmp_path, [("12", "1"), ("12345", "1")]), max_prompt_length=4)
    assert found.rows_of_an_epoch == 1
    assert any("1 of 2 prompts are longer than 4 tokens and would be filtered out" in text for text in found.problems)
    assert any("fewer than data.prompts_per_iteration = 2" in text for text in found.problems)
    assert found.stops
    assert not report(source(tmp_path, [("12", "1"), ("123", "1")]), max_prompt_length=4).stops


def test_too_few_held_out_prompts_stop_a_run(tmp_path: Path):
    rows = [("a", "1"), ("b", "1")]
    held_out = source(tmp_path, [("c", "1")], "held-out")
    found = report(source(tmp_path, rows), held_out=(held_out,), num_prompts=2)
    assert found.stops
    assert "1 held-out prompts are left, fewer than validation.num_prompts = 2" in found.problems
    assert not report(source(tmp_path, rows), held_out=(held_out,), num_prompts=1).stops


def test_characters_that_the_tokenizer_does_not_know_are_counted(tmp_path: Path):
    found = report(source(tmp_path, [("a", "1"), ("\N{GREEK SMALL LETTER ALPHA}", "1")]))
    assert found.sources[0].unknown == 1
    assert any("1 prompts hold characters that the tokenizer does not know" in text for text in found.problems)


def test_a_prompt_that_stands_twice_is_named_by_its_later_row(tmp_path: Path):
    [found] = report(source(tmp_path, [("a", "1"), ("b", "1"), ("a", "2")])).sources
    assert (found.duplicates, found.duplicate_rows) == (1, [2])


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path):
    training = source(tmp_path, [("a", "1"), ("b", "1")], "training")
    held_out = source(tmp_path, [("b", "1"), ("c", "1")], "held-out")
    found = report(training, held_out=(held_out,))
    assert [one.also_in_training for one in found.sources] == [0, 1]
    assert any("1 held-out prompts are training prompts too" in text for text in found.problems)


def test_shares_and_group_sizes_are_those_of_the_sources(tmp_path: Path):
    rows = [("a", "1"), ("b", "1")]
    found = report(source(tmp_path, rows, "x", weight=3.0), source(tmp_path, rows, "y", group_size=2))
    assert [(one.share, one.group_size) for one in found.sources] == [(0.75, 4), (0.25, 2)]


def test_samples_are_shown_as_the_model_sees_them(tmp_path: Path):
    [found] = report(source(tmp_path, [("a=", "1"), ("b=", "2")])).sources
    assert [(one.text, one.answer, one.tokens) for one in found.samples] == [("a=", "1", 2), ("b=", "2", 2)]


@pytest.mark.parametrize(("policy", "said"), [("error", "would stop the run"), ("truncate_left", "would be cut")])
def test_the_fate_of_long_prompts_is_told(tmp_path: Path, policy: str, said: str):
    found = report(source(tmp_path, [("12", "1"), ("12345", "1")]), max_prompt_length=4, overlong_prompts=policy)
    assert said in found.problems[0]
