"""A model's shape from the config, or from a local config.json, or a refusal that names the key."""

import json
from pathlib import Path

import pytest

from configs.model import ModelConfig, ModelShape
from configs.problems import ConfigError
from resources.model_shapes import TIED_BY_DEFAULT, UNTIED_BY_DEFAULT, shape_contradictions, shape_of

LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip


def folder(tmp_path: Path, **changed: object) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    return ModelConfig(path=str(tmp_path))


def test_a_config_json_is_read(tmp_path: Path):
    assert shape_of("model", folder(tmp_path)) == ModelShape(
        num_layers=2, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, vocab_size=10, max_positions=64
    )


def test_a_head_width_of_its_own_is_kept(tmp_path: Path):
    assert shape_of("model", folder(tmp_path, head_dim=16)).kv_width == 16


def test_gpt2s_names_and_its_missing_inner_size_are_understood(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps({"n_layer": 2, "n_embd": 8, "n_head": 2, "n_inner": None, "n_positions": 32, "vocab_size": 10})
    )
    shape = shape_of("model", ModelConfig(path=str(tmp_path)))
    assert (shape.intermediate_size, shape.max_positions) == (32, 32)


@pytest.mark.parametrize(
    ("model_type", "is_tied", "parameters"), [("gemma2", True, 80 + 1192), ("llama", False, 160 + 1192)]
)
def test_an_output_head_that_the_file_does_not_speak_of_is_that_of_the_model_type(
    tmp_path: Path, model_type: str, is_tied: bool, parameters: int
):
    model = folder(tmp_path, model_type=model_type, tie_word_embeddings=None)
    shape = shape_of("model", model)
    assert (shape.tied_embeddings, shape.num_parameters) == (is_tied, parameters)
    for given in (True, False):
        with_shape = model.model_copy(update={"shape": shape.model_copy(update={"tied_embeddings": given})})
        told = [problem.path for problem in shape_contradictions({"model": with_shape})]
        assert told == ([] if given is is_tied else ["model.shape.tied_embeddings"])


def test_an_output_head_of_an_unknown_model_type_contradicts_nothing(tmp_path: Path):
    model = folder(tmp_path, model_type="of_my_own", tie_word_embeddings=None)
    for given in (True, False):
        shape = shape_of("model", model).model_copy(update={"tied_embeddings": given})
        assert list(shape_contradictions({"model": model.model_copy(update={"shape": shape})})) == []


@pytest.mark.parametrize("model_type", sorted(TIED_BY_DEFAULT | UNTIED_BY_DEFAULT))
def test_the_defaults_of_model_types_are_those_of_transformers(model_type: str):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().get_text_config()
    assert config.tie_word_embeddings is (model_type in TIED_BY_DEFAULT)


def test_the_configs_own_shape_comes_first(tmp_path: Path):
    own = ModelShape(num_layers=1, hidden_size=4, intermediate_size=4, num_heads=1, vocab_size=4)
    model = folder(tmp_path).model_copy(update={"shape": own})
    assert shape_of("model", model) is own


def test_a_hub_name_without_a_shape_is_refused_and_never_fetched():
    with pytest.raises(ConfigError, match=r"critic\.model\.shape is missing; .*nothing is fetched to plan"):
        shape_of("critic.model", ModelConfig(path="someone/model"))


def test_a_config_json_that_tells_no_shape_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no shape can be read from it"):
        shape_of("model", ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="it is not JSON"):
        shape_of("model", ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("text", [b"[]", b"null", b"3", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_config_json_that_is_no_object_is_refused(tmp_path: Path, text: bytes):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"it is not JSON that tells a shape .*repair it, or give model\.shape"):
        shape_of("model", ModelConfig(path=str(tmp_path)))


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shape_of("model", ModelConfig(path=f"~/{Path(folder(tmp_path).path or '').relative_to(tmp_path)}"))
