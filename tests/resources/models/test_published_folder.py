"""A published folder is there whole or not at all, wherever its writer was killed."""

import os
import subprocess
import sys
from pathlib import Path

from resources.models.published_folder import published_folder

ROOT = Path(__file__).resolve().parents[3]
WRITER = """
import os, pathlib, sys
from resources.models.published_folder import published_folder

left = int(sys.argv[2])

def end_at_the_last(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if left < 0:
            os._exit(9)

with published_folder(pathlib.Path(sys.argv[1])) as staging:
    for name in ("config.json", "model.safetensors"):
        (staging / name).write_text("new")
    sys.addaudithook(end_at_the_last)
"""


def publish(folder: Path, steps: int) -> int:
    """Publish from a process that ends before its change of the folders after `steps` of them; its exit code."""
    return subprocess.run([sys.executable, "-c", WRITER, str(folder), str(steps)], cwd=ROOT, timeout=60).returncode


def test_a_kill_while_an_older_folder_is_replaced_leaves_no_part_of_either(tmp_path: Path):
    found = []
    for steps in range(20):
        folder = tmp_path / str(steps) / "policy"
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("old")
        code = publish(folder, steps)
        found.append(sorted((path.name, path.read_text()) for path in folder.glob("*")))
        if code == 0:
            break
    old = [("config.json", "old"), ("model.safetensors", "old")]
    new = [("config.json", "new"), ("model.safetensors", "new")]
    assert found[0] == old
    assert found[-1] == new
    assert all(one in (old, [], new) for one in found)
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


def test_a_kill_before_the_first_publication_leaves_nothing_under_the_name(tmp_path: Path):
    assert publish(tmp_path / "policy", 0) == 9
    assert not (tmp_path / "policy").exists()


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path):
    folder, mine = tmp_path / "policy", f".policy-{os.getpid()}"
    for name in ("policy", mine, f"{mine}-older"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("old")
    with published_folder(folder) as staging:
        (staging / "config.json").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (folder / "config.json").read_text() == "new"


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "policy").symlink_to(elsewhere)
    with published_folder(tmp_path / "policy") as staging:
        (staging / "config.json").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "policy"]
    assert not (tmp_path / "policy").is_symlink()
