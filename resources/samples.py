"""The rows of a run as people read them: one parquet file an iteration, with text, scores, advantages and tokens.

    RUN_DIR/samples/iteration-000012.parquet

Every row is there; some of them (spread over the scores) also token by token. An iteration that is run again
replaces its file.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.graders import FINISH_REASONS, Sample

if TYPE_CHECKING:  # reports read samples without paying for torch
    from tensordict import TensorDictBase

_NAME = re.compile(r"^iteration-(\d{6,})\.parquet$")
TOKEN_FIELDS = ("tokens", "token_log_probs", "token_advantages")
"""Fields that hold a list with an entry a token of the response; null in rows without token detail."""
COLUMNS = (
    "iteration", "row_id", "group_id", "source", "index", "prompt", "response", "answer", "score", "advantage",
    "finish_reason", "prompt_length", "response_length", "policy_version", *TOKEN_FIELDS,
)  # fmt: skip
"""What every file has, beside a column a grader."""


class SamplesError(ValueError):
    """A file of samples that cannot be read, or is another program's."""


Decoder = Callable[[Sequence[int]], str]


def write_samples(
    samples: Sequence[Sample],
    rows: "TensorDictBase",
    decode: Decoder,
    *,
    folder: str,
    iteration: int,
    count: int,
    characters: int,
) -> dict[str, Any]:
    """Write the rows of an iteration; gives `shown`, a few of them, small, for the UI.

    A disk that takes no more costs the file and not the run: then the answer says why in `error`.

    Args:
        samples: decoded responses, in the order of `rows`.
        rows: their columns: scores, grades, advantages, train_mask, lengths, versions, rollout_log_probs, ids.
        decode: token ids to text.
        folder: of the run's samples.
        iteration: names the file.
        count: rows with token detail, and in the answer.
        characters: to which prompt and response in the answer are cut.
    """
    scores = [float(score) for score in rows["scores"].tolist()]
    shown = set(spread(scores, count))
    texts: dict[int, str] = {}
    records = [
        _record(sample, rows, place, iteration, _Texts(decode, texts) if place in shown else None)
        for place, sample in enumerate(samples)
    ]
    answer: dict[str, Any] = {
        "shown": [
            {
                "prompt": records[place]["prompt"][:characters],
                "response": records[place]["response"][:characters],
                "score": records[place]["score"],
            }
            for place in sorted(shown)
        ]
    }
    try:
        _write(Path(folder), iteration, records)
    except OSError as error:
        answer["error"] = " ".join(str(error).split())
    return answer


def spread(scores: Sequence[float], count: int) -> list[int]:
    """Positions of `count` rows from the lowest score to the highest; unscorable ones come first.

    >>> spread([0.0, 1.0, 0.5, 0.7], 3)
    [0, 2, 1]
    """
    order = sorted(range(len(scores)), key=lambda place: (not math.isnan(scores[place]), scores[place], place))
    if count >= len(order):
        return order
    last = len(order) - 1
    return [order[round(step * last / max(1, count - 1))] for step in range(count)]


def sample_files(folder: Path) -> dict[int, Path]:
    """Iteration -> its file, ascending."""
    found = {int(name[1]): path for path in _files(folder) if path.is_file() and (name := _NAME.match(path.name))}
    return dict(sorted(found.items()))


def read_samples_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one file. Raises SamplesError for one that cannot be read or lacks a column."""
    import pyarrow.parquet  # a second to import; only where it is used

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SamplesError(f"{path} cannot be read: {error}") from error
    lacking = sorted(set(COLUMNS) - set(table.column_names))
    if lacking:
        raise SamplesError(f"{path} has no columns {lacking}, so no run of Callsheet wrote it")
    return table.to_pylist()


def cut_samples(folder: Path, iteration: int) -> None:
    """Remove the files of `iteration` and later ones: the run goes back to before it."""
    for number, path in sample_files(folder).items():
        if number >= iteration:
            path.unlink()


class _Texts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, decode: Decoder, known: dict[int, str]) -> None:
        self._decode, self._known = decode, known

    def of(self, ids: Iterable[int]) -> list[str]:
        found = []
        for token in ids:
            if token not in self._known:
                self._known[token] = self._decode([token])
            found.append(self._known[token])
        return found


def _record(sample: Sample, rows: "TensorDictBase", place: int, iteration: int, texts: _Texts | None) -> dict[str, Any]:
    score = float(rows["scores"][place])
    trained = _row(rows.get("train_mask"), place)
    advantages = _row(rows.get("advantages"), place)
    used = advantages[trained]
    record: dict[str, Any] = {
        "iteration": iteration,
        "row_id": sample.row_id,
        "group_id": sample.group_id,
        "source": sample.source,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": None if sample.answer is None else str(sample.answer),
        "score": None if math.isnan(score) else score,
        "advantage": float(used.mean()) if used.numel() else 0.0,
        "finish_reason": FINISH_REASONS[sample.finish_reason],
        "prompt_length": int(rows["prompt_lengths"][place]),
        "response_length": sample.response_length,
        "policy_version": int(rows["policy_versions"][place]),
    }
    grades = json.loads(bytes(_row(rows.get("grades"), place).tolist()))
    record |= {f"grader/{name}": grade for name, grade in grades.items()}
    if texts is None:
        return record | dict.fromkeys(TOKEN_FIELDS)
    mask = _row(rows.get("response_mask"), place)
    return record | {
        "tokens": texts.of(_row(rows.get("input_ids"), place)[mask].tolist()),
        "token_log_probs": _rounded(_row(rows.get("rollout_log_probs"), place)[mask]),
        "token_advantages": _rounded(advantages[mask]),
    }


def _row(column: Any, place: int) -> Any:
    offsets = column.offsets()
    return column.values()[int(offsets[place]) : int(offsets[place + 1])]


def _rounded(values: Any) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _write(folder: Path, iteration: int, records: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for record in records for name in record))
    table = pyarrow.table({name: [record.get(name) for record in records] for name in names})
    aside = folder / f".writing-{iteration:06d}-{os.getpid()}"
    try:
        pyarrow.parquet.write_table(table, aside, compression="zstd")
        os.replace(aside, folder / f"iteration-{iteration:06d}.parquet")
    finally:
        aside.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if os.path.isdir(folder) else iter(())
