"""The commands that run a part of the cast: sft fits alone, evaluate scores held-out prompts."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from configs.load import load_config
from configs.problems import ConfigError
from flows.cli import DONE, FAILED, AsJson, ConfigPath, Overrides, Refused, WholeNumber, app
from flows.lasting_output import lasting_stderr
from flows.refusals import tell_ignored, without_traceback
from resources.run_directory import is_run_folder

if TYPE_CHECKING:
    from configs.model import ModelConfig
    from configs.run import RunConfig

DEFAULT_BEST = "validation/sampled_accuracy"


@app.command
def sft(config: ConfigPath, *, set_: Overrides = (), json_: AsJson = False) -> int:
    """Fit a model to the data's answers, or a reward model to pairs (sft.objective); writes RUN/model."""
    checked = load_config(config, set_)
    if checked.sft is None or checked.sft.steps == 0:
        raise Refused("sft.steps is 0 or the sft section is missing, so there is nothing to fit; set sft.steps")

    def run() -> dict[str, Any]:
        from flows.sft import supervised

        return supervised(checked)

    return _run(checked, run, json_, fits=True)


@app.command
def evaluate(
    config: Annotated[
        str, Parameter(help="A config, a preset, or the folder of a run, whose checkpoint is then scored.")
    ],
    *,
    model: Annotated[str | None, Parameter(help="A Hugging Face folder or hub name, in place of the config's.")] = None,
    iteration: Annotated[
        WholeNumber | None, Parameter(help="Which checkpoint of the run; the newest when left out.")
    ] = None,
    best: Annotated[str | None, Parameter(help="The checkpoint with the highest value of this metric.")] = None,
    samples: Annotated[
        WholeNumber | None, Parameter(help="Samples a prompt; validation.samples_per_prompt else.")
    ] = None,
    prompts: Annotated[WholeNumber | None, Parameter(help="Held-out prompts; validation.num_prompts else.")] = None,
    set_: Overrides = (),
    json_: AsJson = False,
) -> int:
    """Score a checkpoint, an export or a hub model on held-out prompts: mean, best and majority with intervals."""
    changes = list(set_)
    changes += [] if samples is None else [f"validation.samples_per_prompt={samples}"]
    changes += [] if prompts is None else [f"validation.num_prompts={prompts}"]
    folder = Path(config)
    is_run = is_run_folder(folder)
    if model is not None and (iteration is not None or best is not None):
        raise Refused("--model and a checkpoint of a run (--iteration, --best) are two models; give one")
    if not is_run and (iteration is not None or best is not None):
        raise Refused(f"--iteration and --best name a checkpoint, and {config} is no run folder")
    checked = load_config(folder / "config.yaml" if is_run else config, changes)
    if not checked.validation.sources:
        raise Refused("validation.sources is empty; name the held-out prompts to score")
    checkpoint = None
    if is_run and model is None:
        checkpoint = checkpoint_of(folder, iteration, best)
    evaluated = renamed(checked, model_to_score(checked, folder if is_run else None, model))

    def run() -> dict[str, Any]:
        from flows.evaluation import evaluation

        return evaluation(evaluated, checkpoint)

    return _run(evaluated, run, json_)


def checkpoint_of(run: Path, iteration: int | None, best: str | None) -> str:
    """The folder of a run's checkpoint: that iteration's, the best by a metric, or the newest. Raises Refused."""
    from resources.checkpoints import CheckpointError, CheckpointStore

    store = CheckpointStore(run / "checkpoints")
    if best is not None:
        iteration = store.best(best)
        if iteration is None:
            raise Refused(f"no checkpoint of {run} has metric {best!r}, for example {DEFAULT_BEST}")
    try:
        found = store.read(iteration) if iteration is not None else store.newest(tell_ignored)
    except CheckpointError as error:
        raise Refused(f"{error}; the checkpoints of {run} are {store.iterations()}") from None
    return str(store.path_of(found.iteration).absolute())


def model_to_score(config: "RunConfig", run: Path | None, model: str | None) -> "ModelConfig":
    """The model named; else what the run started from, which its checkpoint is laid over; else the config's."""
    from configs.model import ModelConfig

    if model is None and run is not None:
        from tasks.export import start_model

        return start_model(config, run.absolute())
    if model is None:
        return config.model
    path = str(Path(model).absolute()) if os.path.isdir(model) else model
    own = config.model.model_dump()
    moved = {"path": path, "build": None, "gguf_file": None, "tokenizer_path": None, "shape": None, "lora": None}
    return ModelConfig.model_validate({**own, **moved})


def renamed(config: "RunConfig", model: "ModelConfig") -> "RunConfig":
    """The config under a name of its own, so that the run that is scored keeps its folder."""
    from tasks.side_run import free_name

    name = free_name(Path(config.run_dir), f"{config.name}.evaluation")
    return config.model_copy(update={"name": name, "model": model, "async_depth": 0})


def _run(config: "RunConfig", flow: Callable[[], dict[str, Any]], as_json: bool, *, fits: bool = False) -> int:
    """Call a flow with a Prefect server, and tell its result."""
    from resources.prefect_server import PrefectServerError
    from tasks.api import ApiUnreachableError, prefect_api, ui_url
    from tasks.session import REFUSALS
    from tasks.start_check import check_start

    with ExitStack() as stack:
        stack.enter_context(lasting_stderr())
        try:
            check_start(config, trains=False, fits=fits)
            url = stack.enter_context(prefect_api(config.prefect))
            print(f"Prefect UI: {ui_url(url)}", file=sys.stderr, flush=True)
            with without_traceback((*REFUSALS, ConfigError)):
                result = flow()
        except (ApiUnreachableError, PrefectServerError, *REFUSALS, ConfigError) as error:
            raise Refused(str(error)) from None
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return FAILED
        except Exception as error:  # noqa: BLE001 - the top of the program: whatever ends a run is told once, in words
            print(f"failed: {error}", file=sys.stderr)
            return FAILED
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in [*result.items(), *result["metrics"].items()]:
            if name != "metrics":
                print(f"{name:>44}  {f'{value:.4g}' if isinstance(value, float) else value}")
    return DONE
