"""Whether the weights of a model folder are whole, told from names, sizes and headers alone. Imports no torch.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header: JSON that gives each
tensor's place behind it. A copy that was cut short ends before the last tensor does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from configs.model import ModelConfig
from configs.problems import UNSAID, Problem
from configs.run import RunConfig
from resources.memory import models_of

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""As the safetensors library has it."""
_LFS = b"version https://git-lfs"
_REPAIR = "copy or download the file again"


class WeightFileError(ValueError):
    """A file of weights that is absent or damaged: which, what is wrong, and what to do."""


def damaged_models(config: RunConfig) -> Iterator[Problem]:
    """Every model of the config whose local folder has weights that are not whole."""
    for path, model in models_of(config).items():
        try:
            check_weight_files(model)
        except WeightFileError as error:
            yield Problem(path, UNSAID, str(error))


def weightless_notes(config: RunConfig) -> list[str]:
    """Models of which this machine has no weights: a shape is enough for a plan, and no run starts from it."""
    notes: list[str] = []
    for path, model in models_of(config).items():
        folder = Path(model.path or "")
        if model.path is None or model.gguf_file is not None:
            continue
        if folder.is_dir():
            if not has_weights(folder):
                what = f"which has no weights ({', '.join(WEIGHT_FILES)})"
                notes.append(f"{path}.path is {model.path!r}, {what}; a plan needs none, training refuses it")
        elif model.path.startswith((".", "/", "~")):
            what = "which is not on this machine"
            notes.append(f"{path}.path is {model.path!r}, {what}; a plan needs no weights, training refuses it")
    return notes


def has_weights(folder: str | Path) -> bool:
    """Whether the folder has a file that may hold weights."""
    return any(file for pattern in WEIGHT_FILES for file in Path(folder).glob(pattern))


def check_weight_files(model: ModelConfig) -> None:
    """Raise WeightFileError for damaged safetensors in the model's local folder; hub names and GGUF files pass."""
    folder = Path(model.path or "")
    if model.path is None or model.gguf_file is not None or not folder.is_dir():
        return
    placed = _placed_tensors(folder / INDEX)
    files = {file.name for file in folder.glob("*.safetensors")}
    if placed:  # beside an index other files of this kind are not read, but for the one of an unsharded model
        files = {*placed, *(files & {"model.safetensors"})}
    for name in sorted(files):
        tensors = _tensors_of(folder / name)
        absent = sorted(placed.get(name, set()) - tensors)
        if absent:
            raise WeightFileError(
                f"{folder / name} lacks {len(absent)} tensors that {INDEX} places there, for example {absent[0]}; "
                "copy or download the folder again"
            )


def _placed_tensors(index: Path) -> dict[str, set[str]]:
    """File name -> the tensors that the index places there; empty where there is no index."""
    if not index.is_file():
        return {}
    try:
        data: Any = json.loads(index.read_text(encoding="utf-8"))
        table = cast("dict[str, str]", data["weight_map"])
        placed: dict[str, set[str]] = {}
        for tensor, file in table.items():
            placed.setdefault(Path(file).name, set()).add(tensor)
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(
            f"{index} is no index of weights ({type(error).__name__}: {str(error)[:100]}); {_REPAIR}"
        ) from None
    missing = sorted(name for name in placed if not (index.parent / name).is_file())
    if missing:
        raise WeightFileError(
            f"{index} names {len(missing)} files that are not there, for example {missing[0]}; copy or download them "
            "into the folder"
        )
    return placed


def _tensors_of(path: Path) -> set[str]:
    """Names of the tensors in a file that ends where its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS))
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            if start == _LFS:
                raise WeightFileError(f"{path} is a pointer of Git LFS, not weights; run git lfs pull in its folder")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                raise WeightFileError(
                    f"{path} has {size} bytes and its header alone would take {length}: it is cut short, or no "
                    f"safetensors file; {_REPAIR}"
                )
            file.seek(_LENGTH_BYTES)
            header: Any = json.loads(file.read(length))
        places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        last = max((int(end) for _, end in places.values()), default=0)
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    except WeightFileError:
        raise
    except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(
            f"{path} has no header of safetensors ({type(error).__name__}: {str(error)[:100]}); {_REPAIR}"
        ) from None
    whole = _LENGTH_BYTES + length + last
    if size != whole:
        fault = "cut short" if size < whole else "damaged"
        raise WeightFileError(f"{path} has {size} bytes and its header tells of {whole}: it is {fault}; {_REPAIR}")
    return set(places)
