"""The `callsheet` command. Each command is a small function; whatever is heavy is imported inside it.

Exit codes: 0 done, 1 failed while running, 2 refused before starting.
"""

import errno
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter, Token

from configs.environment import apply_defaults
from configs.load import load_config
from configs.problems import ConfigError
from resources.node_resources import NodeResources

if TYPE_CHECKING:
    from configs.run import RunConfig
    from resources.telemetry.whatif import Prediction

DONE, FAILED, REFUSED = 0, 1, 2
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
COMMAND_MODULES = (
    "flows.run_commands", "flows.report_commands", "flows.cluster_commands", "flows.data_commands",
    "flows.side_commands",
)  # fmt: skip
"""Each registers its commands with `app` when it is imported."""

app = cyclopts.App(
    name="callsheet",
    help="Trains language models with PPO and its family: every role on its own pool, checked before it starts.",
    version="0.1.0",
    help_format="plaintext",
)

Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set", negative="", consume_multiple=False,
        help="Override one value, for example --set rollout.group_size=8; may be given again.",
    ),
]  # fmt: skip
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object in place of tables.")]
ConfigPath = Annotated[str, Parameter(help="A YAML file, or the name of a preset such as quickstart.")]


_EXPECTED = ("prediction", "unchanged_step_seconds", "measured_step_seconds")
"""Keys of `plan --run --json`."""


class Refused(Exception):  # noqa: N818 - it is an outcome, not an error of ours
    """The command cannot start; the text says why and what to do. Ends with exit code 2."""


def _whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """cyclopts reads 2.5 as 2."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise Refused(f"{tokens[0].keyword} is {text!r}; it is a whole number; give for example 2") from None


WholeNumber = Annotated[int, Parameter(converter=_whole_number)]
"""Every option that is a count or a number of something."""


@app.command
def plan(
    config: ConfigPath,
    *,
    set_: Overrides = (),
    nodes: Annotated[
        str | None, Parameter(help='Nodes to plan for, for example "2x(gpu=8,cpu=96,mem=900GiB)"; no Ray is needed.')
    ] = None,
    address: Annotated[str | None, Parameter(help="HOST:PORT of a running Ray cluster to plan for.")] = None,
    run: Annotated[Path | None, Parameter(help="A past run's folder: predict the step from what it measured.")] = None,
    json_: AsJson = False,
) -> int:
    """Print who would work where, how the rows divide and what memory it takes. Starts nothing.

    Without --nodes and --address it plans for this machine. Exit code 0 when it fits, 2 when it does not.
    """
    from resources.plan import build_plan, local_nodes
    from tasks.graders_of import check_grader_options

    if nodes is not None and address is not None:
        raise Refused(f"--nodes is {nodes!r} and --address is {address!r}; give one of them")
    checked = load_config(config, set_)
    check_grader_options(checked)
    sheet = build_plan(checked, _nodes(nodes, address) or local_nodes(checked))
    expected = _expected(checked, run) if run is not None else None
    if json_:
        more = {} if expected is None else dict(zip(_EXPECTED, (asdict(expected[0]), *expected[1:]), strict=True))
        print(json.dumps({**sheet.as_json(), **more}, default=sorted))
    else:
        from rich.console import Console

        from flows.call_sheet import print_plan

        print_plan(sheet, Console())
        if expected is not None:
            from resources.telemetry.text_report import render_prediction

            print(f"\nWith what {run} measured:\n{render_prediction(*expected)}")
    return DONE if sheet.does_fit else REFUSED


def _expected(config: "RunConfig", run: Path) -> "tuple[Prediction, float, float]":
    from resources.telemetry.planned import predict_plan

    try:
        return predict_plan(config, run)
    except (FileNotFoundError, ValueError) as error:
        raise Refused(f"--run is {run}: {error}") from None


def _nodes(nodes: str | None, address: str | None) -> Sequence[NodeResources]:
    if nodes is not None:
        from resources.node_resources import parse_nodes

        try:
            return parse_nodes(nodes)
        except ValueError as error:
            raise Refused(str(error)) from None
    if address is not None:
        return cluster_nodes(address)
    return ()


def cluster_nodes(address: str) -> Sequence[NodeResources]:
    """The live nodes of a running Ray cluster. Raises Refused when nobody answers at `address`."""
    import logging

    import ray

    from resources.cluster import ClusterError, check_listening
    from resources.inventory import live_nodes

    try:
        check_listening(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ClusterError, ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(f"--address is {address!r}: {error}") from None
    try:
        return live_nodes()
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What a user can cause is told in a block, never as a traceback."""
    apply_defaults()
    for module in COMMAND_MODULES:
        importlib.import_module(module)

    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(tokens, exit_on_error=False, print_error=True, result_action="return_value")
        sys.stdout.flush()
    except cyclopts.CycloptsError:
        return REFUSED  # cyclopts has printed what is wrong with the command line
    except (ConfigError, Refused) as error:
        if "--json" in tokens:
            problems = [str(problem) for problem in error.problems] if isinstance(error, ConfigError) else [str(error)]
            print(json.dumps({"fits": False, "refusals": problems}))
        print(error, file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # whoever read our output has seen enough: `| head`
        _drop_output()
        return DONE
    except SystemExit as ended:  # rich ends the program by itself when a reader is gone
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return DONE
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        _drop_output()
        print(f"{error.filename or 'the output'} cannot be written: {error.strerror}; make room", file=sys.stderr)
        return FAILED
    return result if isinstance(result, int) else DONE


def _drop_output() -> None:
    """What is still held for standard output goes nowhere; the interpreter's end would try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    from flows import cli  # commands register with the module of that name, not with this copy of it

    sys.exit(cli.main())
