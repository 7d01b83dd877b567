"""Optional sinks for an iteration's metrics: TensorBoard, Weights & Biases, MLflow. Each needs its extra installed."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the metrics of an iteration."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Sink -> what it imports; the package that a person installs has the sink's name."""


def import_sink(name: str) -> ModuleType:
    """The module of a sink. Raises ImportError with the way out."""
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ImportError(
            f"telemetry.sinks names {name!r}, which needs the package {name} ({error});"
            f" install it where Callsheet's sources lie: pip install -e '.[sinks]'"
        ) from error


class TensorBoardSink:
    """Event files under RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = import_sink("tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; where it goes (offline, project, key) is that package's own environment."""

    def __init__(self, run_dir: Path) -> None:
        self._run: Any = import_sink("wandb").init(name=run_dir.name, dir=str(run_dir))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run at that package's own tracking address."""

    def __init__(self, run_dir: Path) -> None:
        self._mlflow = import_sink("mlflow")
        self._mlflow.start_run(run_name=run_dir.name)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        # MLflow keeps slashes but not every other sign our names may carry
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=iteration)

    def close(self) -> None:
        self._mlflow.end_run()


SINKS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


def open_sink(name: str, run_dir: Path) -> Sink:
    """A sink of `telemetry.sinks`. Raises ValueError for an unknown name, ImportError for a missing extra."""
    if name not in SINKS:
        raise ValueError(f"telemetry.sinks has {name!r}; known are {sorted(SINKS)}")
    return SINKS[name](run_dir)
