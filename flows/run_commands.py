"""The commands that run something: train, resume. Refusals end with 2, failures with 1, each with one clear text."""

import importlib
import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from configs.load import load_config
from configs.problems import ConfigError
from flows.cli import DONE, FAILED, REFUSED, AsJson, ConfigPath, Overrides, app
from flows.lasting_output import lasting_stderr
from flows.refusals import faults_told_once, without_traceback
from resources.run_directory import is_run_folder
from resources.run_summary import RECENT_ITERATIONS

if TYPE_CHECKING:
    from configs.run import RunConfig

RunFolder = Annotated[Path, Parameter(help="The run's folder, for example runs/quickstart.")]


@app.command
def train(config: ConfigPath, *, set_: Overrides = (), json_: AsJson = False) -> int:
    """Train a run from a config; prints the address of the Prefect UI, then a line an iteration."""
    from resources.run_directory import RunDirectoryError, check_free

    checked = load_config(config, set_)
    try:  # the flow refuses it too; this one costs no server and no import of torch
        check_free(Path(checked.run_dir).absolute(), checked.name)
    except RunDirectoryError as error:
        return _refuse(str(error), json_)
    return run_flow(checked, None, json_)


@app.command
def resume(run: RunFolder, *, json_: AsJson = False) -> int:
    """Go on with a run from its newest complete checkpoint; a finished run says so and does nothing."""
    from resources.checkpoints import CheckpointError
    from resources.run_directory import RunDirectory, RunDirectoryError
    from resources.run_summary import finished_summary

    try:
        RunDirectory.open(run)
    except RunDirectoryError as error:
        return _refuse(str(error), json_)
    config = load_config(run / "config.yaml")
    try:
        summary = finished_summary(run, config.iterations)
    except CheckpointError as error:
        return _refuse(str(error), json_)
    if summary is None:
        return run_flow(config, run, json_)
    print(f"{run} is finished: {config.iterations} of {config.iterations} iterations are done", file=sys.stderr)
    _print_result(summary, json_)
    return DONE


def run_flow(config: "RunConfig", resume_from: Path | None, as_json: bool) -> int:
    """Run the training flow in this process, with a Prefect server where none is named."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")  # the console has a line or a panel of its own
    from configs.unread import unread_notes
    from resources.local_cluster import shared_cores_note
    from resources.prefect_server import PrefectServerError
    from tasks.api import ApiUnreachableError, prefect_api, ui_url
    from tasks.start_check import check_start

    # The flow's imports (torch among them) take seconds, and so does the server's start in a process of its own.
    threading.Thread(target=importlib.import_module, args=("flows.ppo",), daemon=True).start()
    with ExitStack() as stack:
        stack.enter_context(lasting_stderr())  # before Prefect takes the stream for its log
        try:
            if resume_from is None:
                check_start(config)
            else:
                from tasks.resume_check import check_resume  # imports torch, which a new run has no need of here

                check_resume(resume_from)
            url = stack.enter_context(prefect_api(config.prefect))
        except (ApiUnreachableError, ConfigError, PrefectServerError) as error:
            return _refuse(str(error), as_json)
        print(f"Prefect UI: {ui_url(url)}", file=sys.stderr, flush=True)
        note = shared_cores_note(config)
        unread = unread_notes(config) if resume_from is None else []  # a resolved config names every key
        for told in [*([] if note is None else [note]), *unread]:
            print(f"note: {told}", file=sys.stderr, flush=True)
        return _call_flow(stack, config, resume_from, as_json)


def _call_flow(stack: ExitStack, config: "RunConfig", resume_from: Path | None, as_json: bool) -> int:
    from flows.console import console_watcher
    from flows.distillation import distillation
    from flows.ppo import ppo
    from tasks.api import RunCancelledError
    from tasks.session import REFUSALS
    from tasks.watchers import watching

    stack.enter_context(watching(stack.enter_context(console_watcher(config.name))))
    folder = Path(config.run_dir) / config.name if resume_from is None else resume_from
    try:
        flow = distillation if config.algorithm.name == "distillation" else ppo
        with without_traceback((*REFUSALS, ConfigError)), faults_told_once():
            summary: dict[str, Any] = flow(config, None if resume_from is None else str(resume_from))
    except (*REFUSALS, ConfigError) as error:
        return _refuse(str(error), as_json)
    except (KeyboardInterrupt, RunCancelledError):
        print("stopped" + _way_on(folder, "; go on with"), file=sys.stderr)
        return FAILED
    except Exception as error:  # noqa: BLE001 - the top of the program: whatever ends a run is told once, in words
        print(f"failed: {error}" + _way_on(folder, "\nthe run can be resumed"), file=sys.stderr)
        return FAILED
    _print_result(summary, as_json)
    return DONE


def _way_on(folder: Path, text: str) -> str:
    """A run that ended before it had begun has left no folder to go on with."""
    return f"{text}: callsheet resume {folder}" if is_run_folder(folder) else ""


_AVERAGED = {
    "explained_variance": f" (mean of the last {RECENT_ITERATIONS} iterations at most)",
    "kl_to_reference": f" (mean of the last {RECENT_ITERATIONS} iterations at most)",
    "verdict": " (of the last iteration; callsheet report tells the whole run's)",
}
"""What a line of the closing table is of, where it is not of the whole run."""


def _print_result(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:>24}  {'-' if value is None else text}{_AVERAGED.get(name, '') if value is not None else ''}")


def _refuse(text: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"refusals": [text]}))
    print(text, file=sys.stderr)
    return REFUSED
