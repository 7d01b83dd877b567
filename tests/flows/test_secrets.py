"""A judge's key, told to a run by its environment, is sent to the judge and written nowhere."""

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resources.run_directory import read_lines
from tests.chaos.commands import train
from tests.scripted_service import Answer, Script, Serve, said
from tests.tasks.local_cast import small_config

pytestmark = pytest.mark.slow

KEY = "sk-planted-5f1d0c77"
VARIABLE = "PLANTED_JUDGE_KEY"


def refuse_every_other() -> Script:
    """A judge whose refusals hold the key that it was sent."""
    numbers = itertools.count()

    def answer(body: dict[str, Any], attempt: int) -> Answer:
        if next(numbers) % 2:
            return 400, json.dumps({"error": {"message": f"the header Bearer {KEY} is not to my taste"}}), {}
        return said("0.5")

    return answer


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since Ray keeps sockets below it."""
    made = Path(tempfile.mkdtemp(prefix="keys-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_the_key_of_a_judge_is_in_no_file_of_the_run_of_prefect_or_of_ray(
    folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    service = serve(refuse_every_other())
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("RAY_TMPDIR", str(folder / "ray"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (folder / "ray").mkdir()
    judge = f"{{base_url: '{service.url}', api_key_env: {VARIABLE}, max_retries: 0}}"
    config = small_config(
        f"run_dir={folder / 'runs'}", "name=keys", f"prefect.home={folder / 'prefect'}", "iterations=2", "sft=null",
        "checkpoint.every=1", "validation.every=0", "validation.at_start=false", "validation.at_end=false",
        f"reward.graders=[{{name: judge, kind: judge, judge: {judge}}}]",
    )  # fmt: skip
    command = train(config, folder)
    assert command.wait() == 0, command.output()[-3000:]
    assert service.keys == {f"Bearer {KEY}"}
    metrics: list[dict[str, Any]] = list(read_lines(folder / "runs/keys/metrics.jsonl"))
    assert len(metrics) == 2
    searched = [path for path in folder.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "prefect.db", "keys.log", "raylet.out"} <= {path.name for path in searched}
    assert [str(path) for path in searched if KEY.encode() in path.read_bytes()] == []
