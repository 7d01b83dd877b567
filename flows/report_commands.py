"""The commands that read a finished or running run: report, whatif, ui, export."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from configs.problems import ConfigError
from flows.cli import DONE, AsJson, Refused, WholeNumber, app
from flows.refusals import tell_ignored
from flows.run_commands import RunFolder
from resources.run_directory import is_run_folder, own_name

Changes = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set", negative="", consume_multiple=False,
        help="Change the layout in the config's words, for example --set rollout.group_size=16.",
    ),
]  # fmt: skip


@app.command
def report(
    run: RunFolder,
    *,
    html: Annotated[Path | None, Parameter(help="Where to write the page; RUN/report.html when left out.")] = None,
    trace: Annotated[Path | None, Parameter(help="Write a trace of all ranks for Perfetto or Chrome here.")] = None,
    json_: AsJson = False,
) -> int:
    """Say where the time of a run went, by role, and what to change; write the page and, if asked, a trace."""
    from resources.telemetry.html_report import render_html
    from resources.telemetry.report import build_report
    from resources.telemetry.text_report import render_text
    from resources.telemetry.trace import write_trace

    _require_folder(run)
    built = build_report(run)
    page = html or run / "report.html"
    with _written("--html", page):
        render_html(built, page)
    if trace is not None:
        with _written("--trace", trace):
            write_trace(run, trace)
    print(json.dumps(built.to_json()) if json_ else render_text(built))
    print(f"page: {page}", file=sys.stderr)
    return DONE


@app.command
def whatif(
    run: RunFolder,
    *,
    set_: Changes = (),
    search: Annotated[WholeNumber | None, Parameter(help="Find the best layout for that many accelerators.")] = None,
    max_async_depth: Annotated[
        WholeNumber | None, Parameter(help="With --search: let rollouts run ahead so far.")
    ] = None,
    json_: AsJson = False,
) -> int:
    """Predict the step time of a measured run under another layout, or search for the best one.

    Says, too, what the run's own config would refuse of the layout that --set makes.
    """
    from resources.telemetry.report import search_layout
    from resources.telemetry.text_report import render_search

    _require_spans(run)
    if search is not None and set_:
        raise Refused(f"--set is {set_[0]!r} and --search is {search}: a search tries every layout; give one of them")
    if max_async_depth is not None:
        _check_depth(max_async_depth, search)
    try:
        if search is not None:
            found = search_layout(run, search, max_async_depth=max_async_depth or 0)
            print(json.dumps(asdict(found), default=sorted) if json_ else render_search(found))
            return DONE
        print(_predicted(run, _pairs(set_), as_json=json_))
    except ValueError as error:
        raise Refused(str(error)) from None
    return DONE


def _check_depth(depth: int, search: int | None) -> None:
    from resources.telemetry.topology import MOST_ASYNC_DEPTH

    if search is None:
        raise Refused(f"--max-async-depth is {depth}; it bounds a --search; add --search, or leave it out")
    if not 0 <= depth <= MOST_ASYNC_DEPTH:
        raise Refused(f"--max-async-depth is {depth}; it is 0 or more, {MOST_ASYNC_DEPTH} at most; give for example 1")


def _pairs(changes: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set is {change!r}; a change is written KEY=VALUE; write for example {change}=2")
        pairs[key] = value
    return pairs


def _predicted(run: Path, changes: Mapping[str, str], *, as_json: bool) -> str:
    """The prediction as it is printed, with what the run's config would refuse. Raises ValueError."""
    from resources.telemetry.report import profile_of_run
    from resources.telemetry.text_report import render_prediction
    from resources.telemetry.topology import measured_topology, override_topology
    from resources.telemetry.whatif import predict, predict_unchanged

    profile = profile_of_run(run)
    prediction = predict(profile, override_topology(measured_topology(profile), changes))
    unchanged, measured = predict_unchanged(profile), profile.measured_step_seconds
    problems, pinned, why_unchecked = _asked_of_config(run, changes)
    if as_json:
        more = {"unchanged_seconds": unchanged, "measured_seconds": measured}
        notes = {"config_problems": problems, "config_pinned": pinned, "config_unchecked": why_unchecked}
        return json.dumps({**asdict(prediction), **more, **notes}, default=sorted)
    notes = [*(f"the run's config would refuse this: {problem}" for problem in problems), *pinned]
    if why_unchecked is not None:
        notes.append(f"this was not checked against the run's config: {why_unchecked}")
    return render_prediction(prediction, unchanged, measured, notes).rstrip("\n")


def _asked_of_config(run: Path, changes: Mapping[str, str]) -> tuple[list[str], list[str], str | None]:
    """What the run's config would refuse of the changes and what it sets otherwise, or why that cannot be told."""
    from configs.load import load_config
    from configs.what_if import pinned_workers, problems_of_changes

    try:
        config = load_config(run / "config.yaml")
    except ConfigError as error:
        first, *others = error.problems
        return [], [], str(first) + (f" (and {len(others)} more)" if others else "")
    return [str(problem) for problem in problems_of_changes(config, changes)], pinned_workers(config, changes), None


@app.command
def ui(
    run: Annotated[Path | None, Parameter(help="A run's folder; its config says where the database is.")] = None,
) -> int:
    """Serve the stored Prefect database on loopback until Ctrl-C."""
    from configs.load import load_config
    from resources.prefect_server import PrefectServer, PrefectServerError

    home = load_config(run / "config.yaml").prefect.home if run is not None else None
    try:
        with PrefectServer(home) as server:
            print(f"Prefect UI: {server.ui_url} (Ctrl-C ends it)", flush=True)
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
            while not ended.wait(1.0):
                pass
    except PrefectServerError as error:
        raise Refused(str(error)) from None
    except KeyboardInterrupt:
        pass
    return DONE


@app.command
def export(
    run: RunFolder,
    folder: Annotated[Path, Parameter(help="The Hugging Face folder to write; it must not exist.")],
    *,
    iteration: Annotated[
        WholeNumber | None, Parameter(help="Which checkpoint; the newest complete one when left out.")
    ] = None,
    adapter: Annotated[bool, Parameter(negative="", help="Of a LoRA run: the adapter alone, for peft.")] = False,
) -> int:
    """Write the policy of a checkpoint as a Hugging Face folder (safetensors, config.json, tokenizer)."""
    from resources.checkpoints import CheckpointError, CheckpointStore
    from tasks.export import export_checkpoint

    config = _require_run(run)
    taken = own_name(run, folder)
    if taken is not None:
        raise Refused(f"{folder} is where {run} keeps its own {taken}; name a folder outside of the run")
    if os.path.lexists(folder):
        raise Refused(f"{folder} exists; name a folder that does not")
    store = CheckpointStore(run / "checkpoints")
    try:
        manifest = store.read(iteration) if iteration is not None else store.newest(tell_ignored)
    except CheckpointError as error:
        kept = ", ".join(map(str, store.iterations())) or "not there yet; train on, or name another run"
        raise Refused(f"{error}; the checkpoints of {run} are {kept}") from None
    if adapter and config.model.lora is None:
        raise Refused(f"{run} has no adapter: model.lora is not set; leave --adapter out")
    from resources.models.causal_lm import ModelError  # these load torch
    from resources.tensor_files import TensorFileError

    try:
        export_checkpoint(config, run, store.path_of(manifest.iteration), folder, as_adapter=adapter)
    except (ModelError, TensorFileError) as error:
        raise Refused(f"the checkpoint of {manifest.iteration} iterations cannot be exported: {error}") from None
    except OSError as error:
        raise Refused(f"{folder} cannot be written: {error.strerror}; name another folder") from None
    print(f"{folder}: the policy after {manifest.iteration} iterations")
    return DONE


@contextlib.contextmanager
def _written(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}; name another file with {option}") from None


def _require_folder(run: Path) -> None:
    """A report reads no config: that of an older version may have keys that are gone."""
    if not is_run_folder(run):
        raise Refused(f"{run} is no run folder: it has no config.yaml")
    _require_spans(run)


def _require_spans(run: Path) -> None:
    """All that a what-if needs."""
    if not os.path.isfile(run / "spans.jsonl"):
        if not is_run_folder(run):
            raise Refused(f"{run} is no run folder: it has neither config.yaml nor spans.jsonl")
        raise Refused(f"{run} has no spans.jsonl: the run has not begun its first iteration, or measured nothing")


def _require_run(run: Path):  # noqa: ANN202 - a RunConfig, imported inside
    from configs.load import load_config

    if not is_run_folder(run):
        raise Refused(f"{run} is no run folder: it has no config.yaml")
    return load_config(run / "config.yaml")
