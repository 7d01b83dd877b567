"""Which tokens end a model's text, wherever the model lies, and that its generation config goes out as it came."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, LlamaConfig

from configs.model import ModelConfig, ModelShape
from resources.models.causal_lm import prepare_model_folder
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.generation_config import end_token_ids
from tests.alone import alone

TOKENIZER = SimpleNamespace(eos_token_id=2)
TOLD = {"eos_token_id": [2, 7], "do_sample": False, "temperature": 0.6}
"""transformers reads it and would not write it: a temperature without sampling."""
SHAPE = ModelShape(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=2, vocab_size=104, max_positions=64)


def ends(path: str, **named: object) -> set[int]:
    return end_token_ids(path, LlamaConfig(**named), TOKENIZER)


def test_a_model_ends_on_every_token_of_its_generation_config(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ends(str(tmp_path), eos_token_id=5) == {2, 7, 9}


@pytest.mark.parametrize(("named", "expected"), [(5, {2, 5}), ([5, 6], {2, 5, 6}), (None, {2})])
def test_without_a_generation_config_it_ends_on_those_of_its_own(tmp_path: Path, named: object, expected: set[int]):
    assert ends(str(tmp_path), eos_token_id=named) == expected


def test_a_model_that_is_named_as_on_the_hub_ends_on_all_its_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    repository = tmp_path / "hub" / "models--maker--talker"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc" / "generation_config.json").write_text(json.dumps(TOLD))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert alone(ends, "maker/talker") == {2, 7}


def test_a_model_with_another_tokenizer_keeps_a_generation_config_that_transformers_would_not_write(tmp_path: Path):
    made = prepare_model_folder(ModelConfig(build="tiny", shape=SHAPE), 0, tmp_path / "cache")
    (made / "generation_config.json").write_text(json.dumps(TOLD))
    build_character_tokenizer().save_pretrained(tmp_path / "tokens")
    other = ModelConfig(path=str(made), tokenizer_path=str(tmp_path / "tokens"))
    folder = prepare_model_folder(other, 0, tmp_path / "cache")
    kept = GenerationConfig.from_pretrained(str(folder))
    assert folder != made
    assert (kept.eos_token_id, kept.temperature) == ([2, 7], 0.6)
