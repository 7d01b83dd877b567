"""What a user can cause is told in words."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from configs.problems import ConfigError
from flows.refusals import faults_told_once, without_traceback


class Kept(logging.Handler):
    """Keeps the errors that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.exc_info[1] if record.exc_info else None)


def test_a_refusal_leaves_no_traceback_in_the_log_of_flow_runs_and_a_failure_does(monkeypatch: pytest.MonkeyPatch):
    logger, kept = logging.getLogger("prefect.flow_runs"), Kept()
    refusal, failure = ConfigError("x", []), RuntimeError("y")
    monkeypatch.setattr(logger, "handlers", [kept])  # Prefect's own sends to a server
    monkeypatch.setattr(logger, "propagate", False)
    with without_traceback((ConfigError,)):
        logger.error("ended", exc_info=refusal)
        logger.error("ended", exc_info=failure)
    logger.error("ended", exc_info=refusal)
    assert kept.errors == [failure, refusal]


def test_a_failed_iteration_is_left_out_of_the_console_and_the_end_of_a_run_is_not(monkeypatch: pytest.MonkeyPatch):
    kept, sent = Kept(), Kept()
    flow_runs = logging.getLogger("prefect.flow_runs")
    monkeypatch.setattr(logging.getLogger(), "handlers", [kept])
    monkeypatch.setattr(flow_runs, "handlers", [sent])  # what Prefect's server is sent
    lost, ended = RuntimeError("a rank was lost"), RuntimeError("out of recoveries")
    with faults_told_once():
        flow_runs.error("failed", exc_info=lost, extra={"flow_name": "iteration"})
        flow_runs.error("failed", exc_info=ended, extra={"flow_name": "ppo"})
    flow_runs.error("failed", exc_info=lost, extra={"flow_name": "iteration"})
    assert kept.errors == [ended, lost]
    assert sent.errors == [lost, ended, lost]


def test_a_run_name_that_is_taken_is_refused_before_anything_heavy_is_imported(run_dir: Path):
    (run_dir / "demo").mkdir()
    (run_dir / "demo" / "config.yaml").touch()
    code = (
        "import sys; from flows.cli import main\n"
        f"code = main(['train', 'quickstart', '--set', 'name=demo', '--set', 'run_dir={run_dir}'])\n"
        "print(code, sorted({'torch', 'ray', 'prefect', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2 []", done.stderr
    assert f"{run_dir}/demo exists; resume it (callsheet resume {run_dir}/demo), or give the new run" in done.stderr
