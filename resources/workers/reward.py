"""The reward worker: decodes what the policy wrote, lets the reward loop grade it, and gives a score a response.

`begin` takes responses as they finish and returns at once; `score` waits for what was begun and grades the rest. Every
rank gets the whole batch by reference and scores the groups it owns, so siblings meet on one worker.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from configs.model import ModelConfig
from configs.reward import RewardConfig
from resources.batch import make_shard, ragged_from_rows, row_lengths
from resources.dispatch import Dispatch, dispatch
from resources.grader_backends import build_backends
from resources.graders import FinishedRow, Grader, Sample, owner_of, read_sample
from resources.reward_loop import RewardLoop
from resources.reward_scores import NAN, Grade, Moments, Tally, combine, shape_scores
from resources.rows import Rows

Status = dict[str, Any]
Decoder = Callable[[Sequence[int]], str]
RowsReader = Callable[[Sequence[Sample], TensorDictBase, Decoder], Any]
"""fn(samples, their rows, decoder) -> JSON."""

SCORE_SECONDS = 600.0
"""Deadline of `score`, when the caller gives none."""
_OPEN_SCORES = 8


class RewardWorker:
    """One rank of the reward role; a plain class that needs no accelerator."""

    role = "reward"

    def __init__(
        self, reward: RewardConfig, tokenizer: ModelConfig | str | Path | Decoder, graders: Sequence[Grader]
    ) -> None:
        """`tokenizer`: the policy's model, a tokenizer's folder, or a function from token ids to text.

        Raises GraderImportError or SandboxUnavailableError for a grader that cannot run on this node.
        """
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._config = reward
        self._graders = tuple(graders)
        self._decode = tokenizer if callable(tokenizer) else load_decoder(tokenizer)
        self._moments = Moments()
        self._scored: dict[str, TensorDict] = {}
        self._loop = RewardLoop(
            self._graders, reward.processes, build_backends(graders, reward.processes, self.rank, self.world_size)
        )

    @dispatch(Dispatch.PER_RANK, split=("rows",))
    def begin(self, batch_id: str, rows: Sequence[FinishedRow]) -> None:
        """Start grading finished responses of groups this rank owns. Returns at once; see `RewardStream`."""
        answered = [row for row in rows if not row.is_lost]
        if not answered:
            return
        sizes = {row.group_id: row.group_size for row in answered if row.group_size is not None}
        self._loop.begin(batch_id, [self._sample(row) for row in answered], sizes)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def score(
        self,
        batch_id: str,
        rows: TensorDictBase,
        external: Mapping[str, Any] | None = None,
        is_validation: bool = False,
        deadline_seconds: float = SCORE_SECONDS,
    ) -> tuple[Status, TensorDict]:
        """Scores of the groups this rank owns: row_ids, group_ids, `scores` [rows] float32 (nan: unscorable), `grades`.

        `grades` holds the score of each grader as JSON bytes; the status tells the lowest score of each prompt
        (`groups`, by `source:index`) and the ids of groups with a response that nobody answered (`lost_groups`): no
        grader sees it, and it is unscorable.

        Args:
            batch_id: as given to `begin`.
            rows: row_ids, group_ids, record, input_ids, response_mask, finish_reasons, response_lengths.
            external: grader of kind `model` -> row_ids and scores that its worker group gave.
            is_validation: the graders' plain scores: no truncated_score, normalisation or clipping.
            deadline_seconds: for all of it; a response not graded by then is unscorable.

        With `normalise` the scores are plain as well, and `normalise(batch_id, moments)` gives the final ones.
        Raises RewardStoppedError, ValueError.
        """
        started = time.monotonic()
        samples = [
            self._sample(row) for row in finished_rows(rows) if owner_of(row.group_id, self.world_size) == self.rank
        ]
        # Rows inside a mapping arrive as references; only arguments of their own are fetched on the way.
        models = {name: given.load() if isinstance(given, Rows) else given for name, given in (external or {}).items()}
        answered = [sample for sample in samples if not sample.is_lost]
        found = self._loop.finish(batch_id, answered, deadline_seconds)
        grades: dict[int, dict[str, Grade]] = {sample.row_id: {} for sample in samples}
        grades |= {row_id: {**given, **_external(row_id, models)} for row_id, given in found.grades.items()}
        truncated = None if is_validation else self._config.truncated_score
        tally = Tally.empty()
        scores = []
        for sample in samples:
            scores.append(combine(sample, grades[sample.row_id], self._graders, truncated))
            is_replaced = truncated is not None and sample.is_truncated
            tally.add_row(sample, scores[-1], grades[sample.row_id], is_truncation_scored=is_replaced)
        moments = Moments.of(scores)
        if self._config.normalise and not is_validation:
            self._keep(batch_id, _shard(samples, scores, grades))
        elif not is_validation:
            scores = shape_scores(scores, None, self._config.clip)
        status = {
            "metrics": tally.metrics,
            "moments": moments.to_json(),
            "causes": tally.first_causes(),
            "graders": tally.graders(self._graders, self._loop.workers),
            "hidden_seconds": found.hidden_seconds,
            "groups": _lowest(samples, scores),
            "lost_groups": sorted({sample.group_id for sample in samples if sample.is_lost}),
            "spans": {"rank": self.rank, "start": started, "end": time.monotonic(), "rows": len(samples)},
        }
        return status, _shard(samples, scores, grades)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def normalise(self, batch_id: str, moments: Mapping[str, float]) -> tuple[Status, TensorDict]:
        """Final scores: over the running standard deviation that `moments` (of all ranks) updates, then clipped."""
        started = time.monotonic()
        self._moments = self._moments + Moments.from_json(moments)
        shard = self._scored.pop(batch_id)
        shaped = shape_scores(shard["scores"].tolist(), self._moments.std, self._config.clip)
        shard = shard.copy().set("scores", torch.tensor(shaped, dtype=torch.float32))
        spans = {"rank": self.rank, "start": started, "end": time.monotonic(), "rows": len(shaped)}
        return {"metrics": {}, "state": self.state(), "spans": spans}, shard

    @dispatch(Dispatch.RANK_ZERO)
    def report(self, fn: RowsReader, rows: TensorDictBase) -> Status:
        """Let `fn` look at decoded responses, all of the batch on one rank: status with its small JSON `answer`.

        `rows` hold REWARD_COLUMNS and whatever `fn` reads; `fn(samples, rows, decode)` gets the samples in their order.
        """
        started = time.monotonic()
        answer = fn([self._sample(row) for row in finished_rows(rows)], rows, self._decode)
        spans = {"rank": self.rank, "start": started, "end": time.monotonic(), "rows": int(rows.batch_size[0])}
        return {"metrics": {}, "answer": answer, "spans": spans}

    @dispatch(Dispatch.BROADCAST)
    def forget(self, batch_id: str) -> None:
        """Drop a batch whose iteration failed."""
        self._scored.pop(batch_id, None)
        self._loop.forget(batch_id)

    @dispatch(Dispatch.RANK_ZERO)
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; the same on every rank."""
        return self._moments.to_json()

    @dispatch(Dispatch.BROADCAST)
    def load_state(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`; scores that wait for `normalise` are dropped."""
        self._moments = Moments.from_json(state)
        self._scored.clear()

    @dispatch(Dispatch.BROADCAST)
    def close(self) -> None:
        """End grader processes and connections."""
        self._loop.close()

    def _sample(self, row: FinishedRow) -> Sample:
        return read_sample(row, self._decode(row.response_ids))

    def _keep(self, batch_id: str, shard: TensorDict) -> None:
        self._scored[batch_id] = shard
        while len(self._scored) > _OPEN_SCORES:
            del self._scored[next(iter(self._scored))]


def load_decoder(tokenizer: ModelConfig | str | Path) -> Decoder:
    """Token ids -> text without special tokens, from a model's config or a tokenizer's folder.

    A folder with tokenizer.json needs no transformers, which costs seconds to import.
    """
    folder = tokenizer if isinstance(tokenizer, str | Path) else _tokenizer_folder(tokenizer)
    if folder is not None and (Path(folder) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        return lambda ids: fast.decode(list(ids), skip_special_tokens=True)
    if isinstance(tokenizer, ModelConfig):
        from resources.models.causal_lm import load_tokenizer

        slow = load_tokenizer(tokenizer)
    else:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    return lambda ids: str(slow.decode(list(ids), skip_special_tokens=True))


def _tokenizer_folder(model: ModelConfig) -> str | None:
    return model.tokenizer_path or (model.path if model.gguf_file is None else None)


def finished_rows(rows: TensorDictBase) -> list[FinishedRow]:
    """The rows of a shard, with only those response tokens that the policy sampled."""
    columns = {name: rows[name].tolist() for name in ("row_ids", "group_ids", "finish_reasons", "response_lengths")}
    record, ids, mask = rows.get("record"), rows.get("input_ids"), rows.get("response_mask")
    records = bytes(record.values().tolist())
    record_ends = row_lengths(record).cumsum(0).tolist()
    sampled = ids.values()[mask.values()].tolist()
    # Sampled tokens up to each row's end: a running count of the mask, read at the rows' ends.
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), mask.values().cumsum(0)])[ids.offsets()].tolist()
    starts = [0, *record_ends[:-1]]
    return [
        FinishedRow(
            row_id=row_id,
            group_id=columns["group_ids"][place],
            record=records[starts[place] : record_ends[place]],
            response_ids=tuple(sampled[counts[place] : counts[place + 1]]),
            finish_reason=columns["finish_reasons"][place],
            response_length=columns["response_lengths"][place],
        )
        for place, row_id in enumerate(columns["row_ids"])
    ]


def _lowest(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """Prompt -> its lowest score; nan as soon as one response is unscorable."""
    lowest: dict[str, float] = {}
    for sample, score in zip(samples, scores, strict=True):
        key = f"{sample.source}:{sample.index}"
        known = lowest.get(key, score)
        lowest[key] = NAN if math.isnan(known) or math.isnan(score) else min(known, score)
    return lowest


def _shard(samples: Sequence[Sample], scores: Sequence[float], grades: Mapping[int, Mapping[str, Grade]]) -> TensorDict:
    texts = [
        json.dumps({name: None if math.isnan(one.score) else one.score for name, one in grades[sample.row_id].items()})
        for sample in samples
    ]
    return make_shard(
        {
            "row_ids": torch.tensor([sample.row_id for sample in samples], dtype=torch.int64),
            "group_ids": torch.tensor([sample.group_id for sample in samples], dtype=torch.int64),
            "scores": torch.tensor(scores, dtype=torch.float32),
            "grades": ragged_from_rows(
                [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for text in texts], torch.uint8
            ),
        }
    )


def _external(row_id: int, external: Mapping[str, TensorDictBase]) -> dict[str, Grade]:
    grades: dict[str, Grade] = {}
    for name, shard in external.items():
        place = (shard["row_ids"] == row_id).nonzero()
        score = float(shard["scores"][int(place[0])]) if len(place) else NAN
        text = f"grader {name!r}, nonsense: the reward model gave no finite score"
        is_known = abs(score) < float("inf")
        grades[name] = Grade(score=score) if is_known else Grade(score=NAN, cause="nonsense", text=text)
    return grades
