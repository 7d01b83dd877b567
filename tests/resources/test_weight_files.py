"""Whole and damaged files of weights, told without reading a tensor."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from configs.model import ModelConfig
from resources.weight_files import INDEX, WeightFileError, check_weight_files, damaged_models

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def tensors(*names: str, size: int = 8) -> bytes:
    """A file whose tensors lie in the same `size` bytes."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **dict.fromkeys(names, ENTRY)}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def shards(folder: Path, **placed: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


def fault(folder: Path) -> str:
    with pytest.raises(WeightFileError) as caught:
        check_weight_files(ModelConfig(path=str(folder)))
    return str(caught.value)


def test_whole_files_hub_names_and_packed_files_pass(tmp_path: Path):
    (tmp_path / "one.safetensors").write_bytes(tensors("a"))
    shards(tmp_path, a="one.safetensors")
    (tmp_path / "of-another-format.safetensors").write_bytes(b"x")  # not in the index, so nobody reads it
    check_weight_files(ModelConfig(path=str(tmp_path)))
    check_weight_files(ModelConfig(path="some/model"))
    check_weight_files(ModelConfig(path=str(tmp_path), gguf_file="model.gguf"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has 0 bytes and its header alone would take 0"),
        (tensors("a")[:20], "has 20 bytes and its header alone would take "),
        (tensors("a", size=7), "it is cut short; copy or download the file again"),
        (tensors("a", size=9), "it is damaged; copy or download the file again"),
        ((4).to_bytes(8, "little") + b"nope", "has no header of safetensors (JSONDecodeError"),
        ((2).to_bytes(8, "little") + b"[]", "has no header of safetensors (AttributeError"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "has no header of safetensors (TypeError"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS, not weights; run git lfs pull"),
    ],
)
def test_a_file_that_is_not_whole_is_told_by_its_name_and_fault(tmp_path: Path, data: bytes, said: str):
    (tmp_path / "model.safetensors").write_bytes(data)
    found = fault(tmp_path)
    assert found.startswith(f"{tmp_path}/model.safetensors ")
    assert said in found


def test_an_index_that_names_an_absent_file_or_tensor_is_refused(tmp_path: Path):
    (tmp_path / "one.safetensors").write_bytes(tensors("a"))
    shards(tmp_path, a="one.safetensors", b="two.safetensors")
    assert fault(tmp_path).startswith(f"{tmp_path}/{INDEX} names 1 files that are not there, for example two.safet")
    shards(tmp_path, a="one.safetensors", b="one.safetensors")
    assert f"one.safetensors lacks 1 tensors that {INDEX} places there, for example b" in fault(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    assert "is no index of weights (TypeError" in fault(tmp_path)


def test_the_folder_of_every_model_is_looked_at(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    folder = f"{{path: {tmp_path}}}"
    shape = "{num_layers: 1, hidden_size: 32, intermediate_size: 8, num_heads: 1, vocab_size: 128, max_positions: 64}"
    teacher = f"{{path: {tmp_path}, shape: {shape}}}"
    graded = load_config(
        "quickstart",
        [f"model={teacher}", f"critic.model={teacher}", f"reward.graders=[{{name: g, kind: model, model: {folder}}}]"],
    )
    taught = load_config("quickstart-distillation")
    first = taught.teachers[0].model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    taught = taught.model_copy(update={"teachers": (first, *taught.teachers[1:])})
    found = [problem.path for config in (graded, taught) for problem in damaged_models(config)]
    assert found == ["model", "critic.model", "reward.graders.0.model", "teachers.0.model"]
