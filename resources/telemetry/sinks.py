"""Optional sinks for an iteration's metrics: TensorBoard, Weights & Biases, MLflow. Each needs its extra installed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the metrics of an iteration."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def _imported(module: str, sink: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"telemetry.sinks names {sink!r}, which needs the package {package} ({error});"
            f" install it: pip install 'callsheet[sinks]'"
        ) from error


class TensorBoardSink:
    """Event files under RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = _imported("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter(
            str(run_dir / "tensorboard")
        )

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; where it goes (offline, project, key) is that package's own environment."""

    def __init__(self, run_dir: Path) -> None:
        self._run: Any = _imported("wandb", "wandb", "wandb").init(name=run_dir.name, dir=str(run_dir))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run at that package's own tracking address."""

    def __init__(self, run_dir: Path) -> None:
        self._mlflow = _imported("mlflow", "mlflow", "mlflow")
        self._mlflow.start_run(run_name=run_dir.name)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        # MLflow keeps slashes but not every other sign our names may carry
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=iteration)

    def close(self) -> None:
        self._mlflow.end_run()


SINKS: dict[str, type[TensorBoardSink] | type[WandbSink] | type[MlflowSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


def open_sinks(names: tuple[str, ...] | list[str], run_dir: Path) -> list[Sink]:
    """The sinks of `telemetry.sinks`. Raises ValueError for an unknown name, ImportError for a missing extra."""
    unknown = [name for name in names if name not in SINKS]
    if unknown:
        raise ValueError(f"telemetry.sinks has {unknown}; known are {sorted(SINKS)}")
    return [SINKS[name](run_dir) for name in names]
