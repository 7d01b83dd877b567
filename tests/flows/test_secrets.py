"""A judge's key, told to a run by its environment, is sent to the judge and written nowhere."""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from resources.run_directory import read_lines
from tests.chaos.commands import train
from tests.tasks.local_cast import small_config

pytestmark = pytest.mark.slow

KEY = "sk-planted-5f1d0c77"
VARIABLE = "PLANTED_JUDGE_KEY"


class _Judge(BaseHTTPRequestHandler):
    """Refuses every other request in words that hold the key it was sent."""

    count = 0
    sent: set[str | None] = set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        sent = self.headers["Authorization"]
        _Judge.sent.add(sent)
        _Judge.count += 1
        if _Judge.count % 2:
            status, answer = 200, {"choices": [{"message": {"role": "assistant", "content": "0.5"}}]}
        else:
            status, answer = 400, {"error": {"message": f"the header {sent} is not to my taste"}}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since Ray keeps sockets below it."""
    made = Path(tempfile.mkdtemp(prefix="keys-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_the_key_of_a_judge_is_in_no_file_of_the_run_of_prefect_or_of_ray(
    folder: Path, judge_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv("RAY_TMPDIR", str(folder / "ray"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (folder / "ray").mkdir()
    judge = f"{{base_url: '{judge_url}', api_key_env: {VARIABLE}, max_retries: 0}}"
    config = small_config(
        f"run_dir={folder / 'runs'}", "name=keys", f"prefect.home={folder / 'prefect'}", "iterations=2", "sft=null",
        "checkpoint.every=1", "validation.every=0", "validation.at_start=false", "validation.at_end=false",
        f"reward.graders=[{{name: judge, kind: judge, judge: {judge}}}]",
    )  # fmt: skip
    command = train(config, folder)
    assert command.wait() == 0, command.output()[-3000:]
    assert _Judge.sent == {f"Bearer {KEY}"}
    metrics: list[dict[str, Any]] = list(read_lines(folder / "runs/keys/metrics.jsonl"))
    assert len(metrics) == 2
    searched = [path for path in folder.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "prefect.db", "keys.log", "raylet.out"} <= {path.name for path in searched}
    assert [str(path) for path in searched if KEY.encode() in path.read_bytes()] == []
